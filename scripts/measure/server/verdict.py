"""The gate and the recommendation of a server that was measured."""

from collections.abc import Callable, Sequence

from draftsmith.decode.measurement.intervals import LEAST, Estimate, confidence_of_each, format_estimate
from draftsmith.scripts.measure.server.config import MeasureServerConfig
from draftsmith.scripts.measure.server.observe import Setting
from draftsmith.scripts.measure.verdict import SPEEDUP, Alike, Judged, at_level, judge
from draftsmith.scripts.report.reconciliation import Reconciliation
from draftsmith.scripts.report.types import Gate, Recommendation, Run

Bounded = Callable[[Setting, float], Estimate]
"""A figure of a setting, with its interval at a level."""


def judge_server(
    config: MeasureServerConfig,
    runs: Sequence[Run],
    speedup: Bounded,
    alpha: Bounded,
    reconciliations: Sequence[Reconciliation] = (),
) -> tuple[Gate | None, Recommendation]:
    """Return the gate, None where none was asked for, and the recommendation.

    A setting passes by the lower end of its intervals: the speed-up over the baseline server above `min_speedup` (1 if
    there is such a server and no gate on it), α above `min_alpha`, and the counts what a report expects. Without a
    baseline server and without a gate there is nothing to decide.

    Args:
        config: the gates.
        runs: the report's, a setting each.
        speedup: over the baseline server; not asked for without one.
        alpha: of a setting.
        reconciliations: of the settings, where a report is expected; each must agree.
    """
    asked = None
    if config.min_speedup is not None or config.min_alpha is not None or reconciliations:
        asked = Gate(config.min_speedup, None, config.confidence, True, [], min_alpha=config.min_alpha)
    if asked is None and config.baseline_server is None:
        return None, Recommendation(
            False,
            "Nothing to decide: neither a baseline server nor a gate was given. The figures below are acceptance and "
            "latency alone.",
        )
    level, least = confidence_of_each(config.confidence, len(runs)), config.min_speedup or 1.0
    judged = []
    for run in runs:
        setting = run.temperature, run.batch_size
        where, failures = f"at T = {setting[0]:g}, {setting[1]} at once", dict[str, Sequence[str]]()
        if config.baseline_server is not None:
            faster = speedup(setting, level)
            failures[f"{SPEEDUP} {least:g}"] = _below("the speed-up", faster, least, level, where)
        if config.min_alpha is not None:
            agreed = alpha(setting, level)
            failures[f"α above {config.min_alpha:g}"] = _below("α", agreed, config.min_alpha, level, where)
        if config.baseline_server is not None:
            departs = run.lossless.passed is False
            line = f"the text is not the baseline server's, {where}: {run.lossless.reason}"
            failures["the baseline server's text"] = [line] if departs else []
        if reconciliations:
            departing = [one for one in reconciliations if (one.temperature, one.concurrency) == setting]
            failures[f"the counts that {config.expect} expects"] = [
                _departs(one) for one in departing if not one.agrees
            ]
        judged.append(Judged(run, failures))

    def speedup_of(run: Run, alike: Alike) -> Estimate:
        if config.baseline_server is None:
            return run.speedup
        return speedup((run.temperature, run.batch_size), confidence_of_each(0.95, len(runs)))

    def say(run: Run, faster: Estimate, where: str) -> str:
        if faster.value is not None:
            times = format_estimate(speedup((run.temperature, run.batch_size), level), spread="interval")
            where += at_level(config.confidence)
            return f"The server writes {times} times as fast as the baseline server ({where})"
        if config.min_alpha is None:
            counted = "to the integer" if all(one.exact for one in reconciliations) else "within intervals"
            return f"The server counts what {config.expect} expects, {counted} ({where})"
        found = f"above {config.min_alpha:g}"
        if run.alpha is not None and run.alpha.value is not None:
            found = format_estimate(run.alpha, spread="interval")
        return f"Acceptance holds: α is {found} ({where})"

    return judge(judged, config.decides, asked, speedup_of, say, "{} at once")


def _departs(one: Reconciliation) -> str:
    """Return how the server departs from the report, and the likeliest cause, in one sentence."""
    cause = f"; {one.causes[0].name}: {one.causes[0].evidence}" if one.causes else ""
    where = f"T = {one.temperature:g}, {one.concurrency} at once"
    return f"the server departs from {one.report} at {where}{cause}"


def _below(what: str, estimate: Estimate, least: float, confidence: float, where: str) -> list[str]:
    """Return why an estimate's lower end does not exceed a bound, in one sentence or none."""
    level = f"{100 * confidence:.4g}% confidence"
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
