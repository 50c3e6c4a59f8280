"""Charts of the report's page: matplotlib's SVG, with the colours and the font of the page."""

import io
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from draftsmith.decode.measurement.intervals import Estimate

# These placeholder colours are replaced by CSS variables of the page, which has a light and a dark theme.
VARIABLES = {"#ab00f0": "ink", "#ab00f1": "soft", "#ab00f2": "line", "#ab00f3": "paper", "#ab00f4": "good"}
INK, SOFT, LINE, PAPER, GOOD = VARIABLES
SERIES = 6
MARKERS, GLYPHS = ("o", "s", "^", "D", "v", "P"), "●■▲◆▼✚"
Form = Literal["curve", "other_curve", "points"]
SIZE = (6.0, 3.4)  # the size of a chart in inches; the page scales it
OPTIONS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "draftsmith",
    "text.parse_math": False,
    "font.size": 10,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
}


@dataclass(frozen=True)
class Style:
    """A drafter's style in every chart: a colour and, for colour-blind readers, a shape."""

    number: int

    @property
    def colour(self) -> str:
        """The colour for matplotlib."""
        return f"#ab00{self.number % SERIES:02x}"

    @property
    def variable(self) -> str:
        """The CSS variable of the colour."""
        return f"--s{self.number % SERIES}"

    @property
    def marker(self) -> str:
        """The shape for matplotlib."""
        return MARKERS[self.number % SERIES]

    @property
    def glyph(self) -> str:
        """The shape as a character."""
        return GLYPHS[self.number % SERIES]


@dataclass(frozen=True)
class Series:
    """Estimates of one drafter by x, joined by a line or as points with error bars."""

    style: Style
    estimates: Mapping[Any, Estimate]
    form: Form = "curve"  # the form; "other_curve", for another verifier, is dashed
    ringed: float | None = None  # the recommended x

    def known(self) -> dict[float, Estimate]:
        """Return the estimates that have a value, sorted by x."""
        return {x: e for x, e in sorted(self.estimates.items()) if e.value is not None}


def value_of(estimate: Estimate) -> float:
    """Return the value of an estimate that has one."""
    assert estimate.value is not None
    return estimate.value


def limits(estimates: Iterable[Estimate]) -> tuple[float, float]:
    """Return limits that contain all values, all intervals and plain decoding, 1."""
    values = [1.0, *(v for e in estimates for v in (value_of(e), *(e.ci95 or ())))]
    low, high = min(values), max(values)
    room = (high - low or 1.0) * 0.06
    return low - room, high + room


def line_chart(name: str, series: Sequence[Series], y: str, span: tuple[float, float]) -> Markup:
    """Draw values over γ, with y within `span` and a reference line at 1, which is plain decoding.

    The name is unique in the page, and its text for screen readers.
    """
    with matplotlib.rc_context(OPTIONS):
        # Fixed margins in inches: a tight layout would make matplotlib draw everything twice.
        (width, height), (left, bottom, rest) = SIZE, (0.66, 0.5, 0.1)
        figure = Figure(figsize=SIZE)
        axes = figure.add_axes((left / width, bottom / height, 1 - (left + rest) / width, 1 - (bottom + rest) / height))
        axes.set_xlabel("γ")
        axes.set_ylabel(y)
        axes.axhline(1.0, color=SOFT, linewidth=1, dashes=(4, 3))
        points = [s for s in series if s.form == "points"]
        places = sorted({p for s in series for p in s.known()})
        step = 0.05 * min((places[-1] - places[0]) / 4, 1) if len(places) > 1 else 0.05
        for line in series:
            known, style = line.known(), line.style
            xs, values = list(known), [value_of(e) for e in known.values()]
            if line.form == "points":
                # Shift points of different drafters sideways, so that their bars do not overlap.
                aside = (points.index(line) - (len(points) - 1) / 2) * step
                moved = [p + aside for p in xs]
                arms: Any = list(zip(*(e.arms() for e in known.values()), strict=True))
                bars: Any = {"fmt": style.marker, "color": style.colour, "markersize": 6, "elinewidth": 1.6}
                axes.errorbar(moved, values, yerr=arms, **bars)
                for place, value in zip(moved, values, strict=True):
                    if place - aside == line.ringed:
                        axes.plot(place, value, "o", mfc="none", mec=GOOD, mew=2, ms=14, zorder=5)
                continue
            look: dict[str, Any] = {"linewidth": 1.2, "dashes": (3, 2), "markersize": 3.2}
            if line.form == "curve":
                lows, highs = zip(*(e.ci95 or (value_of(e), value_of(e)) for e in known.values()), strict=True)
                axes.fill_between(xs, lows, highs, color=style.colour, alpha=0.16, linewidth=0)
                look |= {"linewidth": 1.6, "dashes": (1, 0)}
            if len(xs) == 1:
                look |= {"markersize": 6, "markerfacecolor": PAPER}
            axes.plot(xs, values, color=style.colour, marker=style.marker, **look)
        few = len(places) <= 8
        axes.xaxis.set_major_locator(FixedLocator(places) if few else MaxNLocator(8, integer=True, min_n_ticks=1))
        axes.set_xlim(places[0] - 0.35, places[-1] + 0.35)
        axes.set_ylim(*span)
        return _svg(figure, name)


def _svg(figure: Figure, name: str) -> Markup:
    file = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # the page's fonts draw the text, not matplotlib's
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    view = re.search(r'viewBox="[^"]+"', svg)
    assert view
    body = svg[svg.index(">", view.end()) + 1 :]
    # Drop matplotlib's styles, fonts and group ids, and make all other ids unique in the page.
    body = re.sub(r"<style.*?</style>", "", body, count=1, flags=re.DOTALL)
    body = re.sub(r' font-family: [^;"]+;?', "", body)
    body = re.sub(r'<g id="[^"]+"', "<g", body)
    body = body.replace("xlink:href", "href")
    prefix = re.sub(r"\W+", "-", name)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", body)
    body = re.sub(r"\s*\n\s*", " ", body)
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, f"var(--{variable})")
    body = re.sub(r"#ab00([0-9a-f]{2})", lambda m: f"var(--s{int(m[1], 16)})", body)
    return Markup('<svg role="img" aria-label="{}" {}>{}').format(escape(name), Markup(view[0]), Markup(body))
