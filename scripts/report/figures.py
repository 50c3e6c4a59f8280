"""Which of the report's figures go into which chart of its page."""

from collections.abc import Iterable, Mapping
from typing import Any

from markupsafe import Markup

from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.scripts.report.charts import Form, Mark, Series, Style, check_chart, dot_chart, limits, line_chart

Report = Mapping[str, Any]
Panel = tuple[str, Markup]
"""A title and a chart."""
TARGET = Style(-1)


def styles(report: Report) -> dict[str, Style]:
    """Give each drafter, by its name, a style that it keeps through the page."""
    names = [one["proposer"]["name"] for one in (*report["curves"], *report["runs"])]
    names += list((report["costs"] or {}).get("draft_seconds") or {})
    names += [p["proposer"] for p in (report["planner_check"] or {}).get("points") or []]
    return {name: Style(i) for i, name in enumerate(dict.fromkeys(names))}


def has_value(estimate: Estimate | None) -> bool:
    """Say whether something was measured."""
    return estimate is not None and estimate.value is not None


def at_length(by_length: Mapping[str, Any], draft_length: int | None) -> Any:
    """Return the entry of this γ; the only one of a drafter that has but one, as Medusa's trees do."""
    if len(by_length) == 1:
        return next(iter(by_length.values()))
    return by_length.get(str(draft_length))


def speedup_panels(report: Report, style: Mapping[str, Style]) -> list[Panel]:
    """Draw predicted and measured speed-ups over γ, a panel for each batch size and temperature."""
    chosen, panels = report["recommendation"] or {}, []
    for temperature, batch in _settings(report):
        series = []
        for curve in _curves(report, temperature):
            predicted = {float(k): e for k, e in curve["predicted_speedup"].get(str(batch), {}).items()}
            series.append(Series(style[curve["proposer"]["name"]], predicted))
        measured: dict[str, dict[float, Estimate]] = {}
        for run in report["runs"]:
            if (run["temperature"], run["batch_size"]) == (temperature, batch):
                measured.setdefault(run["proposer"]["name"], {})[run["draft_length"]] = run["speedup"]
        here = (chosen.get("temperature"), chosen.get("batch_size")) == (temperature, batch)
        for name, own in measured.items():
            ringed = chosen["draft_length"] if here and chosen["proposer"] == name else None
            series.append(Series(style[name], own, "points", ringed))
        panels.append((f"T = {temperature:g}, batch size {batch}", _known(series)))
    span = limits(_estimates(panels), 1.0)
    return [
        (title, line_chart(f"speed-up over γ, {title}", series, "γ", "speed-up", span, level=1.0))
        for title, series in panels
        if series
    ]


def length_panels(report: Report, style: Mapping[str, Style]) -> list[Panel]:
    """Draw τ over γ by replay, and as decoded at the smallest batch size, a panel for each temperature."""
    panels = []
    for temperature in _temperatures(report):
        series = []
        for curve in report["curves"]:
            if curve["temperature"] == temperature:
                lengths = {float(k): e for k, e in curve["mean_acceptance_length"].items()}
                form: Form = "other_curve" if curve["verifier"] == "greedy" else "curve"
                series.append(Series(style[curve["proposer"]["name"]], lengths, form))
        runs = [run for run in report["runs"] if run["temperature"] == temperature]
        least = min((run["batch_size"] for run in runs), default=None)
        decoded: dict[str, dict[float, Estimate]] = {}
        for run in runs:
            if run["batch_size"] == least:
                decoded.setdefault(run["proposer"]["name"], {})[run["draft_length"]] = run["mean_acceptance_length"]
        series += [Series(style[name], own, "points") for name, own in decoded.items()]
        panels.append((f"T = {temperature:g}", _known(series)))
    span = limits(_estimates(panels), 1.0)
    return [
        (title, line_chart(f"τ over γ, {title}", series, "γ", "τ, tokens a target forward", span, level=1.0))
        for title, series in panels
        if series
    ]


def position_panels(report: Report, style: Mapping[str, Style]) -> list[Panel]:
    """Draw conditional acceptance over positions, by replay or else as decoded, a panel for each temperature."""
    panels = []
    for temperature in _temperatures(report):
        by_name = {c["proposer"]["name"]: c["conditional_acceptance"] for c in _curves(report, temperature)}
        runs = [run for run in report["runs"] if run["temperature"] == temperature]
        for run in sorted(runs, key=lambda run: -run["draft_length"]):
            own = [Estimate(a, None, 0) for a in run["conditional_acceptance"]]
            by_name.setdefault(run["proposer"]["name"], own)
        series = [Series(style[name], dict(enumerate(own, 1))) for name, own in by_name.items()]
        panels.append((f"T = {temperature:g}", _known(series)))
    return [
        (
            title,
            line_chart(f"conditional acceptance, {title}", series, "position", "conditional acceptance", (-0.03, 1.03)),
        )
        for title, series in panels
        if series
    ]


def category_panels(report: Report, style: Mapping[str, Style], draft_length: int | None) -> list[Panel]:
    """Draw τ of each category at one γ, and the speed-up where it was measured, a panel for each temperature."""
    panels = []
    for temperature in _temperatures(report):
        lengths: dict[str, dict[str, Estimate | None]] = {}
        for curve in _curves(report, temperature):
            for category, own in curve["by_category"].items():
                found = at_length(own["mean_acceptance_length"], draft_length)
                lengths.setdefault(category, {})[curve["proposer"]["name"]] = found
        panels.append((f"τ, T = {temperature:g}", lengths, "τ"))
    chosen = report["recommendation"] or {}
    for temperature, batch in _settings(report):
        if chosen.get("batch_size") in (None, batch):
            speedups: dict[str, dict[str, Estimate | None]] = {}
            for name in style:
                for category, own in _run_categories(report, name, temperature, batch, draft_length).items():
                    speedups.setdefault(category, {})[name] = own["speedup"]
            panels.append((f"speed-up, T = {temperature:g}, batch size {batch}", speedups, "speed-up"))
    drawn: list[tuple[str, list[str], list[Mark], str]] = []
    for title, by_category, x in panels:
        marks = [
            Mark(row, style[name], estimate)
            for row, own in enumerate(by_category.values())
            for name, estimate in own.items()
            if estimate is not None and has_value(estimate)
        ]
        if marks:
            drawn.append((title, list(by_category), marks, x))
    spans = {
        x: limits([mark.estimate for *_, marks, own in drawn if own == x for mark in marks], 1.0)
        for x in dict.fromkeys(own for *_, own in drawn)
    }
    return [
        (title, dot_chart(f"by category: {title}", rows, marks, x, spans[x], level=1.0))
        for title, rows, marks, x in drawn
    ]


def break_even_panels(report: Report, style: Mapping[str, Style]) -> list[Panel]:
    """Draw the α found and the least α from which some γ pays, a panel for each batch size and temperature."""
    panels = []
    for temperature, batch in _settings(report):
        rows: list[str] = []
        marks = []
        for curve in _curves(report, temperature):
            by_length = curve["break_even_alpha"].get(str(batch))
            if by_length and has_value(curve["alpha"]):
                least = min((a for a in by_length.values() if a is not None), default=None)
                name = curve["proposer"]["name"]
                marks.append(Mark(len(rows), style[name], curve["alpha"], least))
                rows.append(name)
        if rows:
            panels.append((f"T = {temperature:g}, batch size {batch}", rows, marks))
    every = [mark for _, _, marks in panels for mark in marks]
    span = limits([m.estimate for m in every], *(m.threshold for m in every if m.threshold is not None), 0.0, 1.0)
    return [(title, dot_chart(f"α and break-even α, {title}", rows, marks, "α", span)) for title, rows, marks in panels]


def cost_panels(report: Report, style: Mapping[str, Style]) -> list[Panel]:
    """Draw the target's t(k) and each drafter's d(γ) in milliseconds, a panel for each batch size."""
    costs, panels = report["costs"] or {}, []
    for batch, seconds in (costs.get("target_seconds") or {}).items():
        series = [Series(TARGET, _milliseconds(seconds))]
        for name, by_batch in (costs.get("draft_seconds") or {}).items():
            series.append(Series(style[name], _milliseconds(by_batch.get(batch) or {})))
        panels.append((f"batch size {batch}", _known(series)))
    return [
        (title, line_chart(f"costs, {title}", series, "tokens: k of t(k), γ of d(γ)", "ms", (0.0, _highest(series))))
        for title, series in panels
        if series
    ]


def check_panel(report: Report, style: Mapping[str, Style]) -> Markup | None:
    """Draw the planner's predictions against what was measured."""
    points = (report["planner_check"] or {}).get("points") or []
    known = [p for p in points if p["predicted"] is not None and p["measured"] is not None]
    pairs = [(style[p["proposer"]], p["predicted"], p["measured"]) for p in known]
    return check_chart("predicted and measured speed-up", pairs) if pairs else None


def _run_categories(
    report: Report, name: str, temperature: float, batch: int, draft_length: int | None
) -> Mapping[str, Any]:
    found = {
        str(run["draft_length"]): run["by_category"]
        for run in report["runs"]
        if (run["proposer"]["name"], run["temperature"], run["batch_size"]) == (name, temperature, batch)
    }
    return at_length(found, draft_length) or {}


def _curves(report: Report, temperature: float) -> list[Mapping[str, Any]]:
    """Return the replays of what is decoded here: the draft's tokens are drawn, not its argmax."""
    return [c for c in report["curves"] if c["temperature"] == temperature and c["verifier"] != "greedy"]


def _temperatures(report: Report) -> list[float]:
    return sorted({one["temperature"] for one in (*report["curves"], *report["runs"])})


def _settings(report: Report) -> list[tuple[float, int]]:
    found = {(run["temperature"], run["batch_size"]) for run in report["runs"]}
    found |= {(c["temperature"], int(b)) for c in report["curves"] for b in c["predicted_speedup"]}
    return sorted(found)


def _known(series: Iterable[Series]) -> list[Series]:
    return [s for s in series if s.known()]


def _estimates(panels: Iterable[tuple[str, list[Series]]]) -> list[Estimate]:
    return [e for _, series in panels for one in series for e in one.known().values()]


def _highest(series: Iterable[Series]) -> float:
    return limits(_estimates([("", list(series))]))[1]


def _milliseconds(seconds: Mapping[str, float]) -> dict[float, Estimate | None]:
    return {float(k): Estimate(None if s is None else 1000 * s, None, 0) for k, s in seconds.items()}
