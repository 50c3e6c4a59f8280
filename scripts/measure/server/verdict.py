"""The gate and the recommendation of a measured server."""

from collections.abc import Callable, Sequence

from draftsmith.decode.measurement.intervals import LEAST, Estimate, confidence_of_each, format_estimate
from draftsmith.scripts.measure.server.config import MeasureServerConfig
from draftsmith.scripts.measure.server.observe import Setting
from draftsmith.scripts.measure.verdict import SPEEDUP, JudgedRun, Rivals, judge, level_words
from draftsmith.scripts.report.reconciliation import Reconciliation
from draftsmith.scripts.report.types import Gate, Recommendation, Run

Bounded = Callable[[Setting, float], Estimate]
"""A function of a setting and a level that returns an estimate with its interval."""


def judge_server(
    config: MeasureServerConfig,
    runs: Sequence[Run],
    speedup: Bounded,
    alpha: Bounded,
    reconciliations: Sequence[Reconciliation] = (),
) -> tuple[Gate | None, Recommendation]:
    """Return the gate, None if not asked for, and the recommendation.

    A setting passes by the lower ends of its intervals: the speed-up over the baseline server above `min_speedup` (1
    without that gate), and α above `min_alpha`. The counts must be those that a report expects: all `reconciliations`
    must agree. Without a baseline server and without a gate there is nothing to decide.
    """
    demands = None
    if config.min_speedup is not None or config.min_alpha is not None or reconciliations:
        demands = Gate(config.min_speedup, None, config.confidence, True, [], min_alpha=config.min_alpha)
    if demands is None and config.baseline_server is None:
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
            estimate = alpha(setting, level)
            failures[f"α above {config.min_alpha:g}"] = _below("α", estimate, config.min_alpha, level, where)
        if config.baseline_server is not None:
            departs = run.lossless.passed is False
            line = f"the text is not the baseline server's, {where}: {run.lossless.reason}"
            failures["the baseline server's text"] = [line] if departs else []
        if reconciliations:
            of_setting = [e for e in reconciliations if (e.temperature, e.concurrency) == setting]
            departures = [_departs(entry) for entry in of_setting if not entry.agrees]
            failures[f"the counts that {config.expect} expects"] = departures
        judged.append(JudgedRun(run, failures))

    def speedup_of(run: Run, alike: Rivals) -> Estimate:
        if config.baseline_server is None:
            return run.speedup
        return speedup((run.temperature, run.batch_size), confidence_of_each(0.95, len(runs)))

    def say(run: Run, faster: Estimate, where: str) -> str:
        if faster.value is not None:
            times = format_estimate(speedup((run.temperature, run.batch_size), level), spread="interval")
            where += level_words(config.confidence)
            return f"The server writes {times} times as fast as the baseline server ({where})"
        if config.min_alpha is None:
            exact = all(entry.exact for entry in reconciliations)
            counted = "to the integer" if exact else "within intervals"
            return f"The server counts what {config.expect} expects, {counted} ({where})"
        value = f"above {config.min_alpha:g}"
        if run.alpha is not None and run.alpha.value is not None:
            value = format_estimate(run.alpha, spread="interval")
        return f"Acceptance holds: α is {value} ({where})"

    return judge(judged, config.decides, demands, speedup_of, say, "{} at once")


def _departs(entry: Reconciliation) -> str:
    cause = f"; {entry.causes[0].name}: {entry.causes[0].evidence}" if entry.causes else ""
    where = f"T = {entry.temperature:g}, {entry.concurrency} at once"
    return f"the server departs from {entry.report} at {where}{cause}"


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
