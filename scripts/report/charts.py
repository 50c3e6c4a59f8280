"""Charts of the report's page: matplotlib's SVG, with the colours and the font of the page."""

import io
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from draftsmith.decode.measurement.intervals import Estimate

# These placeholder colours are replaced by CSS variables of the page, which has a light and a dark theme.
VARIABLES = {"#ab00f0": "ink", "#ab00f1": "soft", "#ab00f2": "line", "#ab00f3": "paper", "#ab00f4": "good"}
INK, SOFT, LINE, PAPER, GOOD = VARIABLES
SERIES = 6
MARKERS, GLYPHS = ("o", "s", "^", "D", "v", "P"), "●■▲◆▼✚"
Form = Literal["curve", "other_curve", "points"]
WIDTH = 6.0  # the width of a chart in inches; the page scales it
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
    """A drafter's style in every chart: a colour and, for colour-blind readers, a shape. -1 is the target."""

    number: int

    @property
    def colour(self) -> str:
        """The colour for matplotlib."""
        return INK if self.number < 0 else f"#ab00{self.number % SERIES:02x}"

    @property
    def variable(self) -> str:
        """The CSS variable of the colour."""
        return "--ink" if self.number < 0 else f"--s{self.number % SERIES}"

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


def limits(estimates: Iterable[Estimate], *more: float) -> tuple[float, float]:
    """Return limits that contain all values, all intervals and `more`."""
    values = [v for e in estimates for v in (value_of(e), *(e.ci95 or ()))]
    low, high = min([*values, *more]), max([*values, *more])
    room = (high - low or abs(high) or 1.0) * 0.06
    return low - room, high + room


def line_chart(
    name: str,
    series: Sequence[Series],
    x: str,
    y: str,
    span: tuple[float, float],
    level: float | None = None,
    counted: bool = True,
) -> Markup:
    """Draw values over γ, positions or numbers of tokens, with y within `span` and a reference line at `level`.

    The name is unique in the page, and its text for screen readers. If x is `counted`, in small integers, each has a
    tick.
    """
    with matplotlib.rc_context(OPTIONS):
        figure, axes = _axes((WIDTH, 3.4), x, y)
        if level is not None:
            axes.axhline(level, color=SOFT, linewidth=1, dashes=(4, 3))
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
                _bars(axes, moved, values, list(known.values()), style)
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
        axes.xaxis.set_major_locator(
            FixedLocator(places) if counted and len(places) <= 8 else MaxNLocator(8, integer=counted, min_n_ticks=1)
        )
        room = 0.35 if counted else 0.03 * (places[-1] - places[0] or 1.0)
        axes.set_xlim(places[0] - room, places[-1] + room)
        axes.set_ylim(*span)
        return _svg(figure, name)


@dataclass(frozen=True)
class Mark:
    """One drafter's estimate in one row of a dot chart."""

    row: str
    style: Style
    estimate: Estimate


def dot_chart(
    name: str, marks: Sequence[Mark], x: str, span: tuple[float, float], level: float | None = None
) -> Markup:
    """Draw a row for each category, with a dot and its interval for each drafter, over x within `span`."""
    with matplotlib.rc_context(OPTIONS):
        rows = list(dict.fromkeys(mark.row for mark in marks))
        labels = [_short(row) for row in rows]
        left = 0.3 + 0.085 * max(map(len, labels))
        crowd = max(sum(m.row == row for m in marks) for row in rows)
        figure, axes = _axes((WIDTH, 0.6 + (0.22 + 0.1 * crowd) * len(rows)), x, "", left)
        axes.grid(axis="y", visible=False)
        if level is not None:
            axes.axvline(level, color=SOFT, linewidth=1, dashes=(4, 3))
        for height, row in enumerate(rows):
            row_marks = [m for m in marks if m.row == row]
            for i, mark in enumerate(row_marks):
                y, value = height + (i - (len(row_marks) - 1) / 2) * 0.7 / crowd, value_of(mark.estimate)
                _bars(axes, [y], [value], [mark.estimate], mark.style, upright=False)
        axes.set_yticks(range(len(rows)), labels)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(*span)
        axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
        return _svg(figure, name)


def check_chart(name: str, points: Sequence[tuple[Style, float, float]], band: float = 0.1) -> Markup:
    """Draw measured over predicted speed-ups, with the diagonal and a relative band around it."""
    with matplotlib.rc_context(OPTIONS):
        figure, axes = _axes((WIDTH, 4.6), "predicted speed-up", "measured speed-up")
        values = [v for _, *pair in points for v in pair]
        room = 0.08 * (max(values) - min(values) or max(values))
        low, high = min(values) - room, max(values) + room
        ends = [low, high]
        below, above = [v * (1 - band) for v in ends], [v * (1 + band) for v in ends]
        axes.fill_between(ends, below, above, color=SOFT, alpha=0.16, linewidth=0)
        axes.plot(ends, ends, color=SOFT, linewidth=1)
        for style, predicted, measured in points:
            axes.plot(predicted, measured, style.marker, color=style.colour, markersize=6, alpha=0.9)
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        return _svg(figure, name)


def _axes(size: tuple[float, float], x: str, y: str, left: float = 0.66) -> tuple[Figure, Axes]:
    # Fixed margins in inches: a tight layout would make matplotlib draw everything twice.
    (width, height), (bottom, rest) = size, (0.5, 0.1)
    figure = Figure(figsize=size)
    axes = figure.add_axes((left / width, bottom / height, 1 - (left + rest) / width, 1 - (bottom + rest) / height))
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def _bars(
    axes: Axes, places: list[float], values: list[float], estimates: list[Estimate], style: Style, upright: bool = True
) -> None:
    arms = list(zip(*(e.arms() for e in estimates), strict=True))
    look: dict[str, Any] = {"fmt": style.marker, "color": style.colour, "markersize": 6, "elinewidth": 1.6}
    if upright:
        axes.errorbar(places, values, yerr=arms, **look)
    else:
        axes.errorbar(values, places, xerr=arms, **look)


def _short(words: str, most: int = 22) -> str:
    words = "".join(c if c.isprintable() else " " for c in words)
    return words if len(words) <= most else words[: most - 1] + "…"


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
