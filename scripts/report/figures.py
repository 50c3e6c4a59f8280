"""The selection of the report's figures for the charts of its page."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from markupsafe import Markup

from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.scripts.report.charts import Form, Series, Style, limits, line_chart
from draftsmith.scripts.report.entries import Grouping
from draftsmith.scripts.report.types import Report, Run
from draftsmith.scripts.report.words import at_length, group_words

Panel = tuple[str, Markup]  # A title and a chart
GROUPINGS: tuple[Grouping, ...] = ("category", "context")


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
            Series(style[curve.proposer.name], curve.predicted_speedup.get(batch, {}))
            for curve in report.curves
            if curve.temperature == temperature and curve.verifier != "greedy"  # decoding draws draft tokens from q
        ]
        for name, runs in _runs(report, temperature, batch).items():
            ringed = next((run.draft_length for run in runs if run.key in winners), None)
            series.append(Series(style[name], {run.draft_length: run.speedup for run in runs}, "points", ringed))
        panels.append((f"T = {temperature:g}, {setting_words(report, batch)}", series))
    return _lines(panels, "speed-up over γ", "speed-up")


def length_panels(report: Report, style: Mapping[str, Style]) -> list[Panel]:
    """Draw τ over γ by replay, and as decoded at the smallest batch size, a panel for each temperature."""
    panels = []
    for temperature in sorted({curve.temperature for curve in report.curves} | {r.temperature for r in report.runs}):
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
    return _lines(panels, "τ over γ", "τ, tokens per target forward")


def group_rows(report: Report, draft_length: int | None) -> list[dict[str, Any]]:
    """Return the figures of each category and length of context at one γ: replayed, of a server as it wrote them."""
    rows: list[dict[str, Any]] = []
    chosen = report.recommendation.batch_size
    measured = {
        (run.proposer.name, run.temperature, run.draft_length, group): figures
        for run in report.runs
        for group, figures in (run.by_category.items() if chosen in (None, run.batch_size) else ())
    }
    for curve in report.curves:
        name, temperature = curve.proposer.name, curve.temperature
        k = (curve.proposer.tree_nodes and next(iter(curve.mean_acceptance_length))) or draft_length
        for grouping in GROUPINGS if curve.verifier != "greedy" else ():
            for group, figures in curve.groups(grouping).items():
                timed = measured.get((name, temperature, k or 0, group)) if grouping == "category" else None
                rows.append(
                    {"drafter": name, "temperature": temperature, "group": group_words(grouping, group)}
                    | {"prompts": figures.prompts, "tokens": figures.tokens, "alpha": figures.alpha}
                    | {"length": at_length(figures.mean_acceptance_length, k), "speedup": timed and timed.speedup}
                )
    if report.server is not None:
        rows += [
            {"drafter": name, "temperature": temperature, "group": group, "tokens": None, "alpha": None}
            | {"prompts": of.prompts, "length": of.mean_acceptance_length, "speedup": of.speedup}
            for (name, temperature, _, group), of in measured.items()
        ]
    return rows


def _lines(panels: Sequence[tuple[str, Sequence[Series]]], name: str, y: str) -> list[Panel]:
    """Draw panels of lines over γ with common limits of y; leave out empty series and panels."""
    known = [(title, [line for line in series if line.known()]) for title, series in panels]
    span = limits([estimate for _, series in known for line in series for estimate in line.known().values()])
    return [(title, line_chart(f"{name}, {title}", series, y, span)) for title, series in known if series]


def _runs(report: Report, temperature: float, batch: int) -> dict[str, list[Run]]:
    """Return the runs of a setting by drafter."""
    runs: dict[str, list[Run]] = {}
    for run in report.runs:
        if (run.temperature, run.batch_size) == (temperature, batch):
            runs.setdefault(run.proposer.name, []).append(run)
    return runs


def _settings(report: Report) -> list[tuple[float, int]]:
    settings = {(run.temperature, run.batch_size) for run in report.runs}
    return sorted(settings | {(c.temperature, b) for c in report.curves for b in c.predicted_speedup})
