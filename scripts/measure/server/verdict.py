"""The gate and the recommendation of a server that was measured."""

from collections.abc import Mapping, Sequence

from draftsmith.decode.measurement.intervals import LEAST, Estimate, format_estimate
from draftsmith.scripts.measure.server.config import MeasureServerConfig
from draftsmith.scripts.measure.server.observe import Setting
from draftsmith.scripts.report.reconciliation import Reconciliation
from draftsmith.scripts.report.types import Gate, GatePart, Recommendation, Run

Bounded = Mapping[Setting, Estimate]
"""By setting; the interval is at the gates' level."""


def judge(
    config: MeasureServerConfig,
    runs: Sequence[Run],
    speedups: Bounded,
    alphas: Bounded,
    reconciliations: Sequence[Reconciliation] = (),
) -> tuple[Gate | None, Recommendation]:
    """Return the gate, None where none was asked for, and the recommendation.

    Every setting that was measured must pass, by the lower end of its interval: the speed-up over the baseline server
    above `min_speedup` (1 if there is one and no gate on it), α above `min_alpha`, and the counts what a
    report expects. Without a baseline server and without a gate there is nothing to decide.

    Args:
        config: the gates.
        runs: the report's, a setting each.
        speedups: over the baseline server; empty without one.
        alphas: of the settings.
        reconciliations: of the settings, where a report is expected; each must agree.
    """
    by_setting = {(run.temperature, run.batch_size): run for run in runs}
    slow, low, departing = list[str](), list[str](), list[str]()
    least = 1.0 if config.min_speedup is None else config.min_speedup
    for setting, run in by_setting.items():
        where = f"at T = {setting[0]:g}, {setting[1]} at once"
        if config.baseline_server is not None:
            slow += _below("the speed-up", speedups[setting], least, config.confidence, where)
        if config.min_alpha is not None:
            low += _below("α", alphas[setting], config.min_alpha, config.confidence, where)
        if run.lossless.passed is False:
            departing.append(f"the text is not the baseline server's, {where}: {run.lossless.reason}")
    counted = [_departs(one) for one in reconciliations if not one.agrees]
    failures = [*slow, *low, *departing, *counted]
    gate = None
    if config.min_speedup is not None or config.min_alpha is not None or reconciliations:
        parts = []
        if config.baseline_server is not None:
            parts.append(GatePart(f"speed-up above {least:g}", not slow))
        if config.min_alpha is not None:
            parts.append(GatePart(f"α above {config.min_alpha:g}", not low))
        if config.baseline_server is not None:
            parts.append(GatePart("the baseline server's text", not departing))
        if reconciliations:
            parts.append(GatePart(f"the counts that {config.expect} expects", not counted))
        asked = config.min_speedup, None, config.confidence
        gate = Gate(*asked, not failures, failures, min_alpha=config.min_alpha, parts=parts)
    if gate is None and config.baseline_server is None:
        return gate, Recommendation(
            False,
            "Nothing to decide: neither a baseline server nor a gate was given. The figures below are acceptance and "
            "latency alone.",
        )
    worst = min(runs, key=lambda run: _first(run.speedup, run.alpha))
    return gate, Recommendation(
        not failures,
        f"Don't deploy: {failures[0]}." if failures else f"{_reason(config, worst, reconciliations)}.",
        *worst.setting,
        measured_speedup=worst.speedup,
    )


def _first(*estimates: Estimate | None) -> float:
    """Return the first value that is known."""
    return next((e.value for e in estimates if e is not None and e.value is not None), 0.0)


def _reason(config: MeasureServerConfig, run: Run, reconciliations: Sequence[Reconciliation]) -> str:
    where = f"T = {run.temperature:g}, {run.batch_size} at once"
    least = "" if len(config.settings) == 1 else f", the least of {len(config.settings)} settings"
    if run.speedup.value is not None:
        times = format_estimate(run.speedup, spread="interval")
        return f"The server writes {times} times as fast as the baseline server ({where}{least})"
    if config.min_alpha is None:
        counted = "to the integer" if all(one.exact for one in reconciliations) else "within intervals"
        return f"The server counts what {config.expect} expects, {counted} ({where}{least})"
    found = f"above {config.min_alpha:g}"
    if run.alpha is not None and run.alpha.value is not None:
        found = format_estimate(run.alpha, spread="interval")
    return f"Acceptance holds: α is {found} ({where}{least})"


def _departs(one: Reconciliation) -> str:
    """Return how the server departs from the report, and the likeliest cause, in one sentence."""
    cause = f"; {one.causes[0].name}: {one.causes[0].evidence}" if one.causes else ""
    where = f"T = {one.temperature:g}, {one.concurrency} at once"
    return f"the server departs from {one.report} at {where}{cause}"


def _below(what: str, estimate: Estimate, least: float, confidence: float, where: str) -> list[str]:
    """Return why an estimate's lower end does not exceed a bound, in one sentence or none."""
    level = f"{confidence:.0%} confidence"
    if estimate.value is None and estimate.ci95 is None:
        return [f"{what} is not known {where}: see the warnings"]
    if estimate.ci95 is None:
        if estimate.n >= LEAST:
            return [f"{what} has no interval {where}: see the warnings"]
        return [f"{estimate.n} prompts or turns are too few for {level}, which needs {LEAST}, of {what} {where}"]
    low, high = estimate.ci95
    if low > least:
        return []
    value = "in" if estimate.value is None else f"{estimate.value:.2f}"
    return [f"{what} must exceed {least:g} with {level}, and is {value} [{low:.2f}, {high:.2f}] {where}"]
