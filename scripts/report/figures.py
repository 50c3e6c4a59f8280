"""The selection of the report's figures for the charts of its page."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from markupsafe import Markup

from draftsmith.decode.measurement.intervals import LEAST, Estimate
from draftsmith.scripts.report.charts import Form, Mark, Series, Style, check_chart, dot_chart, limits, line_chart
from draftsmith.scripts.report.entries import Grouping
from draftsmith.scripts.report.types import Curve, Report, Run
from draftsmith.scripts.report.words import at_length, group_words, who_drafted

Panel = tuple[str, Markup]  # A title and a chart
TARGET = Style(-1)
GROUPINGS: dict[Grouping, str] = {
    "category": "Categories",
    "part": "Thinking, answer and tool calls",
    "turn": "Turns",
    "context": "Length of context",
}
"""The titles of the page's sections on groups, in their order."""


def styles(report: Report) -> dict[str, Style]:
    """Return a style for each drafter, by name, for all charts of the page."""
    return {name: Style(i) for i, name in enumerate(report.proposers())}


def has_value(estimate: Estimate | None) -> TypeGuard[Estimate]:
    """Return whether an estimate has a value."""
    return estimate is not None and estimate.value is not None


def setting_words(report: Report, batch: int) -> str:
    """Describe a batch size, or the number of concurrent requests to a server."""
    if report.server is None:
        return f"batch size {batch}"
    return "one request at a time" if batch == 1 else f"{batch} requests at once"


def speedup_panels(report: Report, style: Mapping[str, Style]) -> list[Panel]:
    """Draw predicted and measured speed-ups over γ, a panel for each batch size and temperature."""
    winners, panels = report.winners(), []
    for temperature, batch in _settings(report):
        series = [
            Series(style[curve.proposer.name], curve.predictions.get(batch, {}))
            for curve in _curves(report, temperature)
        ]
        for name, runs in _runs(report, temperature, batch).items():
            ringed = next((run.draft_length for run in runs if run.key in winners), None)
            series.append(Series(style[name], {run.draft_length: run.speedup for run in runs}, "points", ringed))
        panels.append((f"T = {temperature:g}, {setting_words(report, batch)}", series))
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
        least = min((run.batch_size for run in report.runs if run.temperature == temperature), default=1)
        for name, runs in _runs(report, temperature, least).items():
            lengths = {run.draft_length: run.mean_acceptance_length for run in runs}
            series.append(Series(style[name], lengths, "points"))
        panels.append((f"T = {temperature:g}", series))
    return _lines(panels, "τ over γ", "γ", "τ, tokens per target forward", level=1.0)


def position_panels(report: Report, style: Mapping[str, Style]) -> list[Panel]:
    """Draw conditional acceptance over positions, by replay or else as decoded, a panel for each temperature."""
    panels = []
    for temperature in _temperatures(report):
        by_name = {c.proposer.name: c.conditional_acceptance for c in _curves(report, temperature)}
        for run in report.runs:
            if run.temperature == temperature:
                decoded = [Estimate(a, None, 0) for a in run.conditional_acceptance]
                by_name.setdefault(run.proposer.name, decoded)
        series = [Series(style[name], dict(enumerate(rates, 1))) for name, rates in by_name.items()]
        panels.append((f"T = {temperature:g}", series))
    return _lines(panels, "conditional acceptance", "position", "conditional acceptance", span=(-0.03, 1.03))


def group_sizes(report: Report, grouping: Grouping) -> dict[str, int]:
    """Return the number of prompts of each group, in its order."""
    if grouping == "category":
        return dict(report.prompts.categories)
    sizes: dict[str, int] = {}
    for curve in report.curves:
        sizes |= {name: group.prompts for name, group in curve.groups(grouping).items()}
    for run in report.runs:  # of fewer prompts, or of a server, which has no curves
        sizes = {name: group.prompts for name, group in run.groups(grouping).items()} | sizes
    return sizes


def group_panels(
    report: Report, style: Mapping[str, Style], grouping: Grouping, draft_length: int | None
) -> list[Panel]:
    """Draw τ of each group at one γ, and the speed-up, a panel for each temperature.

    The speed-up of groups of prompts was measured; that of groups of tokens is predicted. Groups of too few prompts
    for an interval, whose charts would show only chance, are left out.
    """
    drawn: list[tuple[str, str, list[Mark]]] = []
    shown = [name for name, prompts in group_sizes(report, grouping).items() if prompts >= LEAST]
    batches = [(t, batch) for t, batch in _settings(report) if report.recommendation.batch_size in (None, batch)]
    for temperature in _temperatures(report):
        marks = [
            Mark(group_words(grouping, name), style[curve.proposer.name], length)
            for name in shown
            for curve in _curves(report, temperature)
            if (figures := curve.groups(grouping).get(name)) is not None
            and has_value(length := at_length(figures.mean_acceptance_length, draft_length))
        ]
        drawn.append(("τ", f"T = {temperature:g}", marks))
    for temperature, batch in batches:
        predicted, measured = list[Mark](), list[Mark]()
        for curve in _curves(report, temperature):
            for name, figures in curve.groups(grouping).items():
                speedup = at_length(figures.predicted_speedup.get(batch, {}), draft_length)
                if name in shown and has_value(speedup):
                    predicted.append(Mark(group_words(grouping, name), style[curve.proposer.name], speedup))
        for name, runs in _runs(report, temperature, batch).items():
            of_run = at_length({run.draft_length: run.groups(grouping) for run in runs}, draft_length) or {}
            measured += [
                Mark(group_words(grouping, group), style[name], figures.speedup)
                for group, figures in of_run.items()
                if group in shown and has_value(figures.speedup)
            ]
        title = f"T = {temperature:g}, {setting_words(report, batch)}"
        of_tokens = grouping in ("part", "context")
        drawn.append(("predicted speed-up" if of_tokens else "speed-up", title, predicted if of_tokens else measured))
    panels = []
    for x, title, marks in drawn:
        if marks:
            # Panels of the same quantity share their limits.
            span = limits([mark.estimate for quantity, _, row in drawn if quantity == x for mark in row], 1.0)
            panels.append((f"{x}, {title}", dot_chart(f"{x} by {grouping}, {title}", marks, x, span, level=1.0)))
    return panels


def groupings(report: Report, style: Mapping[str, Style], draft_length: int | None) -> list[dict[str, Any]]:
    """Return what the page shows of each grouping that the report has, at one γ: panels, and a row for each figure."""
    found: list[dict[str, Any]] = []
    for grouping, title in GROUPINGS.items():
        if sizes := group_sizes(report, grouping):
            found.append(
                {
                    "id": grouping,
                    "title": title,
                    "sizes": {group_words(grouping, name): prompts for name, prompts in sizes.items()},
                    "panels": group_panels(report, style, grouping, draft_length),
                    "rows": [
                        {
                            "curve": curve,
                            "name": group_words(grouping, name),
                            "group": group,
                            "length": at_length(group.mean_acceptance_length, draft_length),
                            "drafted": who_drafted(group, draft_length),
                        }
                        for temperature in _temperatures(report)
                        for curve in _curves(report, temperature)
                        for name, group in curve.groups(grouping).items()
                    ],
                }
            )
    return found


def load_panels(report: Report, style: Mapping[str, Style]) -> list[Panel]:
    """Draw goodput over batch size, plain and with the draft lengths that pay, if several sizes were measured."""
    if not report.by_load or len(report.by_load[0].goodput) < 2:
        return []
    plain = {rows: Estimate(goodput.plain, None, 0) for rows, goodput in report.by_load[0].goodput.items()}
    series = [Series(TARGET, plain)]
    for load in report.by_load:
        drafting = {rows: Estimate(goodput.drafting, None, 0) for rows, goodput in load.goodput.items()}
        series.append(Series(style[load.proposer], drafting))
    highest = limits(_estimates(series))[1]
    return _lines([("", series)], "goodput", "texts at a time", "tokens per second", span=(0.0, highest))


def cost_panels(report: Report, style: Mapping[str, Style]) -> list[Panel]:
    """Draw the target's t(k) and each drafter's d(γ) in milliseconds, a panel for each batch size."""
    panels: list[Panel] = []
    for batch, seconds in (report.costs.target_seconds if report.costs else {}).items():
        series = [Series(TARGET, _milliseconds(seconds))]
        for name, by_batch in (report.costs.draft_seconds if report.costs else {}).items():
            series.append(Series(style[name], _milliseconds(by_batch.get(batch, {}))))
        highest = limits(_estimates(series))[1]
        panels += _lines(
            [(f"batch size {batch}", series)], "costs", "tokens: k of t(k), γ of d(γ)", "ms", span=(0.0, highest)
        )
    return panels


def check_panel(report: Report, style: Mapping[str, Style]) -> Markup | None:
    """Draw the planner's predictions against the measurements."""
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
    """Draw panels of lines with common limits of y; leave out empty series and panels."""
    known = [(title, [line for line in series if line.known()]) for title, series in panels]
    span = span or limits([e for _, series in known for e in _estimates(series)], 1.0)
    return [(title, line_chart(f"{name}, {title}", series, x, y, span, level)) for title, series in known if series]


def _runs(report: Report, temperature: float, batch: int) -> dict[str, list[Run]]:
    """Return the runs of a setting by drafter."""
    runs: dict[str, list[Run]] = {}
    for run in report.runs:
        if (run.temperature, run.batch_size) == (temperature, batch):
            runs.setdefault(run.proposer.name, []).append(run)
    return runs


def _curves(report: Report, temperature: float) -> list[Curve]:
    """Return the replays that match decoding, where draft tokens are drawn from q."""
    return [c for c in report.curves if c.temperature == temperature and c.verifier != "greedy"]


def _temperatures(report: Report) -> list[float]:
    return sorted({curve.temperature for curve in report.curves} | {run.temperature for run in report.runs})


def _settings(report: Report) -> list[tuple[float, int]]:
    settings = {(run.temperature, run.batch_size) for run in report.runs}
    return sorted(settings | {(c.temperature, b) for c in report.curves for b in c.predicted_speedup})


def _estimates(series: Iterable[Series]) -> list[Estimate]:
    return [estimate for line in series for estimate in line.known().values()]


def _milliseconds(seconds: Mapping[int, float]) -> dict[int, Estimate]:
    return {k: Estimate(1000 * s, None, 0) for k, s in seconds.items()}
