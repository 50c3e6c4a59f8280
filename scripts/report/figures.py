"""Which of the report's figures go into which chart of its page."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from markupsafe import Markup

from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.scripts.report.charts import Form, Mark, Series, Style, check_chart, dot_chart, limits, line_chart
from draftsmith.scripts.report.types import Curve, Report, RunCategory

Panel = tuple[str, Markup]
"""A title and a chart."""
TARGET = Style(-1)
Value = TypeVar("Value")


def styles(report: Report) -> dict[str, Style]:
    """Give each drafter, by its name, a style that it keeps through the page."""
    return {name: Style(i) for i, name in enumerate(report.proposers())}


def has_value(estimate: Estimate | None) -> bool:
    """Say whether something was measured."""
    return estimate is not None and estimate.value is not None


def at_length(by_length: Mapping[int, Value], draft_length: int | None) -> Value | None:
    """Return the entry of this γ; the only one of a drafter that has but one, as Medusa's trees do."""
    if len(by_length) == 1:
        return next(iter(by_length.values()))
    return None if draft_length is None else by_length.get(draft_length)


def speedup_panels(report: Report, style: Mapping[str, Style]) -> list[Panel]:
    """Draw predicted and measured speed-ups over γ, a panel for each batch size and temperature."""
    chosen, panels = report.recommendation, []
    for temperature, batch in _settings(report):
        series = [
            Series(style[curve.proposer.name], curve.predicted_speedup.get(batch, {}))
            for curve in _curves(report, temperature)
        ]
        measured: dict[str, dict[float, Estimate]] = {}
        for run in report.runs:
            if (run.temperature, run.batch_size) == (temperature, batch):
                measured.setdefault(run.proposer.name, {})[run.draft_length] = run.speedup
        here = (chosen.temperature, chosen.batch_size) == (temperature, batch)
        for name, speedups in measured.items():
            ringed = chosen.draft_length if here and chosen.proposer == name else None
            series.append(Series(style[name], speedups, "points", ringed))
        panels.append((f"T = {temperature:g}, batch size {batch}", series))
    return _lines(panels, "speed-up over γ", "γ", "speed-up", level=1.0)


def length_panels(report: Report, style: Mapping[str, Style]) -> list[Panel]:
    """Draw τ over γ by replay, and as decoded at the smallest batch size, a panel for each temperature."""
    panels = []
    for temperature in _temperatures(report):
        series = []
        for curve in report.curves:
            if curve.temperature == temperature:
                form: Form = "other_curve" if curve.verifier == "greedy" else "curve"
                series.append(Series(style[curve.proposer.name], curve.mean_acceptance_length, form))
        runs = [run for run in report.runs if run.temperature == temperature]
        least = min((run.batch_size for run in runs), default=None)
        decoded: dict[str, dict[float, Estimate]] = {}
        for run in runs:
            if run.batch_size == least:
                decoded.setdefault(run.proposer.name, {})[run.draft_length] = run.mean_acceptance_length
        series += [Series(style[name], lengths, "points") for name, lengths in decoded.items()]
        panels.append((f"T = {temperature:g}", series))
    return _lines(panels, "τ over γ", "γ", "τ, tokens a target forward", level=1.0)


def position_panels(report: Report, style: Mapping[str, Style]) -> list[Panel]:
    """Draw conditional acceptance over positions, by replay or else as decoded, a panel for each temperature."""
    panels = []
    for temperature in _temperatures(report):
        by_name = {c.proposer.name: c.conditional_acceptance for c in _curves(report, temperature)}
        runs = [run for run in report.runs if run.temperature == temperature]
        for run in sorted(runs, key=lambda run: -run.draft_length):
            by_name.setdefault(run.proposer.name, [Estimate(a, None, 0) for a in run.conditional_acceptance])
        series = [Series(style[name], dict(enumerate(rates, 1))) for name, rates in by_name.items()]
        panels.append((f"T = {temperature:g}", series))
    return _lines(panels, "conditional acceptance", "position", "conditional acceptance", span=(-0.03, 1.03))


def category_panels(report: Report, style: Mapping[str, Style], draft_length: int | None) -> list[Panel]:
    """Draw τ of each category at one γ, and the speed-up where it was measured, a panel for each temperature."""
    panels = []
    for temperature in _temperatures(report):
        lengths: dict[str, dict[str, Estimate | None]] = {}
        for curve in _curves(report, temperature):
            for category, figures in curve.by_category.items():
                length = at_length(figures.mean_acceptance_length, draft_length)
                lengths.setdefault(category, {})[curve.proposer.name] = length
        panels.append((f"τ, T = {temperature:g}", lengths, "τ"))
    for temperature, batch in _settings(report):
        if report.recommendation.batch_size in (None, batch):
            speedups: dict[str, dict[str, Estimate | None]] = {}
            for name in style:
                for category, run in _run_categories(report, name, temperature, batch, draft_length).items():
                    speedups.setdefault(category, {})[name] = run.speedup
            panels.append((f"speed-up, T = {temperature:g}, batch size {batch}", speedups, "speed-up"))
    drawn: list[tuple[str, list[str], list[Mark], str]] = []
    for title, by_category, x in panels:
        marks = [
            Mark(row, style[name], estimate)
            for row, by_name in enumerate(by_category.values())
            for name, estimate in by_name.items()
            if estimate is not None and has_value(estimate)
        ]
        if marks:
            drawn.append((title, list(by_category), marks, x))
    spans = {
        x: limits([mark.estimate for *_, marks, of in drawn if of == x for mark in marks], 1.0)
        for x in dict.fromkeys(of for *_, of in drawn)
    }
    return [
        (title, dot_chart(f"by category: {title}", rows, marks, x, spans[x], level=1.0))
        for title, rows, marks, x in drawn
    ]


def break_even_panels(report: Report, style: Mapping[str, Style]) -> list[Panel]:
    """Draw the measured α and the least α from which some γ pays, a panel for each batch size and temperature."""
    panels = []
    for temperature, batch in _settings(report):
        rows: list[str] = []
        marks = []
        for curve in _curves(report, temperature):
            by_length = curve.break_even_alpha.get(batch)
            if by_length and has_value(curve.alpha):
                least = min((a for a in by_length.values() if a is not None), default=None)
                name = curve.proposer.name
                marks.append(Mark(len(rows), style[name], curve.alpha, least))
                rows.append(name)
        if rows:
            panels.append((f"T = {temperature:g}, batch size {batch}", rows, marks))
    every = [mark for _, _, marks in panels for mark in marks]
    span = limits([m.estimate for m in every], *(m.threshold for m in every if m.threshold is not None), 0.0, 1.0)
    return [(title, dot_chart(f"α and break-even α, {title}", rows, marks, "α", span)) for title, rows, marks in panels]


def cost_panels(report: Report, style: Mapping[str, Style]) -> list[Panel]:
    """Draw the target's t(k) and each drafter's d(γ) in milliseconds, a panel for each batch size."""
    if report.costs is None:
        return []
    panels: list[Panel] = []
    for batch, seconds in report.costs.target_seconds.items():
        series = [Series(TARGET, _milliseconds(seconds))]
        for name, by_batch in report.costs.draft_seconds.items():
            series.append(Series(style[name], _milliseconds(by_batch.get(batch, {}))))
        title = f"batch size {batch}"
        highest = limits(_estimates(series))[1]
        panels += _lines([(title, series)], "costs", "tokens: k of t(k), γ of d(γ)", "ms", span=(0.0, highest))
    return panels


def check_panel(report: Report, style: Mapping[str, Style]) -> Markup | None:
    """Draw the planner's predictions against what was measured."""
    if report.planner_check is None:
        return None
    points = [(style[p.proposer], p.predicted, p.measured) for p in report.planner_check.points]
    return check_chart("predicted and measured speed-up", points)


def _lines(
    panels: Sequence[tuple[str, Sequence[Series]]],
    name: str,
    x: str,
    y: str,
    span: tuple[float, float] | None = None,
    level: float | None = None,
) -> list[Panel]:
    """Draw panels of lines that share the limits of y, without series and panels that hold nothing."""
    known = [(title, [one for one in series if one.known()]) for title, series in panels]
    span = span or limits([e for _, series in known for e in _estimates(series)], 1.0)
    return [(title, line_chart(f"{name}, {title}", series, x, y, span, level)) for title, series in known if series]


def _run_categories(
    report: Report, name: str, temperature: float, batch: int, draft_length: int | None
) -> Mapping[str, RunCategory]:
    by_length = {
        run.draft_length: run.by_category
        for run in report.runs
        if (run.proposer.name, run.temperature, run.batch_size) == (name, temperature, batch)
    }
    return at_length(by_length, draft_length) or {}


def _curves(report: Report, temperature: float) -> list[Curve]:
    """Return the replays of what is decoded here: the draft's tokens are drawn, not its argmax."""
    return [c for c in report.curves if c.temperature == temperature and c.verifier != "greedy"]


def _temperatures(report: Report) -> list[float]:
    return sorted({curve.temperature for curve in report.curves} | {run.temperature for run in report.runs})


def _settings(report: Report) -> list[tuple[float, int]]:
    settings = {(run.temperature, run.batch_size) for run in report.runs}
    return sorted(settings | {(c.temperature, b) for c in report.curves for b in c.predicted_speedup})


def _estimates(series: Iterable[Series]) -> list[Estimate]:
    return [e for one in series for e in one.known().values()]


def _milliseconds(seconds: Mapping[int, float]) -> dict[int, Estimate]:
    return {k: Estimate(1000 * s, None, 0) for k, s in seconds.items()}
