"""Verdicts from a report's figures: comparisons, a verdict for each setting, the recommendation and the gate.

A setting is what users ask for: a temperature and a batch size (of a server, requests at once). A configuration is what
a server is started with: a drafter and one γ.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from draftsmith.decode.measurement import intervals
from draftsmith.decode.measurement.intervals import LEAST, Estimate, Interval
from draftsmith.scripts.kinds import STOCK
from draftsmith.scripts.measure.estimates import Observation, Observations
from draftsmith.scripts.measure.state import Method, Replays
from draftsmith.scripts.measure.winner import Timed, held_out_speedup
from draftsmith.scripts.report.entries import Forecast
from draftsmith.scripts.report.types import (
    Comparison,
    Failure,
    Gate,
    GatePart,
    Recommendation,
    Run,
    Setting,
    SettingVerdict,
)
from draftsmith.scripts.report.words import setting_names

Configuration = tuple[str, int]
Rivals = Mapping[Configuration, Sequence[Run]]
"""The configurations that the best one was chosen among, with their runs."""
Gains = Mapping[tuple[str, int, int, float], Estimate | None]
"""The gain of τ over the stock draft by `Run.key`, with an interval at the level at which each run is judged."""
Demands = Mapping[str, Callable[[Run], Sequence[str]]]
"""Requirements on a run, by name: each function returns the reasons why a run does not meet it."""
SPEEDUP, GAIN, TEXT = "speed-up above", "gain of τ over the stock draft", "lossless text"
"""The beginnings of demands on the speed and the gain, and the demand on the text."""


def comparisons(replays: Replays, draft_lengths: Sequence[int]) -> list[Comparison]:
    """Compare drafters two by two on the same texts, paired over prompts, at each γ that both have."""
    compared = []
    for temperature, verifier in dict.fromkeys((t, verifier) for t, _, verifier in replays):
        by_name = {name: r for (t, name, v), r in replays.items() if (t, v) == (temperature, verifier)}
        for name, other in combinations(by_name, 2):
            if name == STOCK:
                name, other = other, name  # being ahead of the stock draft reads as a gain
            first, second = by_name[name], by_name[other]
            alpha = intervals.ratio_difference(*first.overlaps_and_contexts(), *second.overlaps_and_contexts())
            for k in draft_lengths:
                if k in first.draft_lengths and k in second.draft_lengths:
                    length = intervals.ratio_difference(*first.tokens_and_rounds(k), *second.tokens_and_rounds(k))
                    compared.append(Comparison(temperature, verifier, k, name, other, length, alpha))
    return compared


def candidates(runs: Sequence[Run], min_gain: float | None) -> list[Run]:
    """Return the runs of drafters that may be deployed: not the stock draft if a gain over it is asked for."""
    return [run for run in runs if min_gain is None or run.proposer.kind != "baseline_draft"]


@dataclass(frozen=True)
class JudgedRun:
    """A run, and the reasons why it does not pass."""

    run: Run
    failures: Mapping[str, Sequence[str]]
    """Reasons by demand, the speed-up first; empty where the run meets it."""
    barred: bool = False
    """True if its gain or its text rules it out, however fast it is."""


@dataclass(frozen=True)
class Best:
    """The best configuration in one setting, or in several that one server answers."""

    runs: Sequence[JudgedRun]
    slowest: Run
    speedup: Estimate
    """The speed-up of `slowest`, corrected for the choice of the best (the winner's curse)."""

    @property
    def parts(self) -> dict[str, list[str]]:
        """Reasons why it does not pass, by demand."""
        return {what: [line for entry in self.runs for line in entry.failures[what]] for what in self.runs[0].failures}

    @property
    def departs(self) -> bool:
        """True if a text is not the target's."""
        return any(entry.run.lossless.passed is False for entry in self.runs)

    @property
    def failures(self) -> list[str]:
        """All reasons why it does not pass; a text that is not the target's comes first, however fast it is."""
        parts = sorted(self.parts.items(), key=lambda part: self.departs and part[0] != TEXT)
        return [line for _, lines in parts for line in lines]


def best_of(judged: Sequence[JudgedRun], observations: Observations, count: int) -> Best:
    """Return the configuration that passes and is the fastest in its slowest setting; the fastest if none passes.

    `count` is the number of all runs that are judged.
    """
    by_configuration: dict[Configuration, list[JudgedRun]] = {}
    for entry in judged:
        by_configuration.setdefault((entry.run.proposer.name, entry.run.draft_length), []).append(entry)
    passes = {c: not any(map(any, (entry.failures.values() for entry in runs))) for c, runs in by_configuration.items()}
    slowest = {c: min((entry.run for entry in runs), key=_speed) for c, runs in by_configuration.items()}
    best = max(by_configuration, key=lambda c: (passes[c], _speed(slowest[c])))
    # The best is the fastest of the barred configurations if it is barred, and of the others if it is not: the
    # correction is over these. A distribution that was not tested bars nothing.
    barred = {c: any(entry.barred for entry in runs) for c, runs in by_configuration.items()}
    rivals = {c: [entry.run for entry in runs] for c, runs in by_configuration.items() if barred[c] == barred[best]}
    return Best(by_configuration[best], slowest[best], _unbiased(slowest[best], rivals, observations, count))


def judge(
    runs: Sequence[Run],
    observations: Observations,
    demands: Demands,
    gate: Gate | None,
    confidence: float,
    say: Callable[[Run, Estimate, str], str],
    at_once: str = "batch size {}",
) -> tuple[Gate | None, Recommendation]:
    """Return the judged gate, if there is one, and the recommendation with a verdict for each setting.

    Each setting has a best configuration of its own. The recommendation and the gate are about one configuration that
    passes in all settings, because a server is started with one.

    Args:
        demands: the one on the speed-up first; the intervals of all runs hold together (Bonferroni).
        say: (run, speed-up, the setting in words) → a sentence without its full stop.
        at_once: how sentences name the batch size.
    """
    level = intervals.confidence_of_each(confidence, len(runs))
    judged = []
    for run in runs:
        failures = {what: reasons(run) for what, reasons in demands.items()}
        barred = any(lines for what, lines in failures.items() if what.startswith(GAIN))
        judged.append(JudgedRun(run, failures, barred or run.lossless.passed is False))
    settings = list(dict.fromkeys(run.setting for run in runs))

    def best_in(*among: Setting) -> Best:
        return best_of([entry for entry in judged if entry.run.setting in among], observations, len(judged))

    def sentence(best: Best) -> str:
        where = f"T = {best.slowest.temperature:g}, {at_once.format(best.slowest.batch_size)}"
        where += f", the least of {len(best.runs)} measured" if len(best.runs) > 1 else ""
        return say(best.slowest, replace(best.speedup, ci95=bounds_of(best.slowest, observations, level)), where)

    verdicts = []
    for setting in settings:
        best = best_in(setting)
        reason = f"{sentence(best)}." if not best.failures else _why_not(best, sentence(best))
        key = best.slowest.key[:2]
        verdicts.append(SettingVerdict(*setting, not best.failures, reason, *key, best.speedup, best.departs))
    # One configuration for all settings, which need not be the best of any single one.
    best = best_in(*settings)
    parts = [GatePart(what, not lines) for what, lines in best.parts.items()]
    gate = gate and replace(gate, passed=not best.failures, failures=best.failures, parts=parts)
    pays = [verdict for verdict in verdicts if verdict.go]
    if not best.failures:
        reason = f"{sentence(best)}."
    elif gate is None and len(pays) == len(settings):
        reason = f"Each setting has a drafter that pays, but no drafter with one γ pays in all: {best.failures[0]}."
    elif gate is None and pays:
        names = setting_names(settings, at_once)
        where = "; ".join(names[verdict.temperature, verdict.batch_size] for verdict in pays)
        losing_reason = next(verdict.reason for verdict in verdicts if not verdict.go)
        reason = f"Deploy where it pays: {where}. {losing_reason}"
    elif gate is None:
        reason = f"Don't deploy. As measured, {_why_not(best, sentence(best))}"
    else:
        reason = f"Don't deploy: {best.failures[0]}."
    return gate, Recommendation(
        not best.failures,
        reason,
        *best.slowest.key,
        predicted_speedup=best.slowest.predicted_speedup,
        measured_speedup=best.speedup,
        settings=verdicts,
    )


def partial(
    gate: Gate | None, recommendation: Recommendation, failures: Sequence[Failure]
) -> tuple[Gate | None, Recommendation]:
    """Return the gate and the recommendation of a report; where parts of it failed, there is no GO in any setting."""
    if not failures:
        return gate, recommendation
    first, many = failures[0], len(failures)
    reason = f"the report is partial, {many} of its parts failed, first {first.what}: {first.error}"
    verdicts = [
        replace(verdict, go=False, reason=f"No GO: {reason}. {verdict.reason}") for verdict in recommendation.settings
    ]
    reason = f"Don't deploy: {reason}. {recommendation.reason}"
    if gate is not None:
        failed = [f"{failure.what} failed" for failure in failures]
        parts = [GatePart("a whole report", False), *gate.parts]
        gate = replace(gate, passed=False, failures=[*failed, *gate.failures], parts=parts)
    return gate, replace(recommendation, go=False, reason=reason, settings=verdicts)


def _why_not(best: Best, sentence: str) -> str:
    """Return why the best configuration does not pass, with its speed-up unless its gain or text rules it out."""
    what, slow = next(iter(best.parts.items()))
    if slow and what.startswith(SPEEDUP) and best.speedup.ci95 is not None and not any(e.barred for e in best.runs):
        return f"{sentence}: a {what} is not shown."
    return f"{best.failures[0]}."


def judge_runs(
    runs: Sequence[Run],
    observations: Observations,
    gains: Gains,
    gate: Gate | None,
    confidence: float,
    require_test: bool = True,
) -> tuple[Gate | None, Recommendation]:
    """Return the judged gate of decoded runs, if there is one, and the recommendation.

    A run passes if the lower bound of its speed-up is above the gate's `min_speedup` (1 if None), that of its gain
    above `min_gain`, and its text is the target's. One configuration in one setting is enough. So each run is judged at
    a level at which the bounds of all hold together, and the best one's speed-up is reported on prompts that did not
    choose it.

    `gains` has intervals at `confidence_of_each(confidence, …)` of the candidates.
    `require_test` recommends no run whose text was sampled without a test of its distribution.
    """
    min_speedup, min_gain = (None, None) if gate is None else (gate.min_speedup, gate.min_gain)
    least, may_be_deployed = 1.0 if min_speedup is None else min_speedup, candidates(runs, min_gain)
    level = intervals.confidence_of_each(confidence, len(may_be_deployed))
    if not may_be_deployed:
        failed = ["there is nothing to deploy but the stock draft"]
        gate = gate and replace(gate, passed=False, failures=failed)
        return gate, Recommendation(False, "Nothing but the stock draft was measured.")

    def slow(run: Run) -> list[str]:
        speedup = replace(run.speedup, ci95=bounds_of(run, observations, level))
        return _below("the speed-up", speedup, "batches", least, level, run)

    def gains_less(run: Run) -> list[str]:
        gain = gains.get(run.key)
        if gain is None or gain.value is None:
            return [f"no gain over a stock draft is known for {_where(run)}"]
        return _below(f"the {GAIN}", gain, "prompts", min_gain or 0.0, level, run)

    demands = {f"{SPEEDUP} {least:g}": slow}
    if min_gain is not None:
        demands[f"{GAIN} above {min_gain:g}"] = gains_less
    demands[TEXT] = lambda run: _departs(run, require_test)

    def say(run: Run, speedup: Estimate, where: str) -> str:
        times = intervals.format_estimate(speedup, spread="interval")
        drafter = f"{run.proposer.name} with γ = {run.draft_length}"
        return f"{drafter} decodes {times} times as fast as plain decoding ({where}{level_words(confidence)})"

    gate, recommendation = judge(may_be_deployed, observations, demands, gate, confidence, say)
    how = _how_judged(may_be_deployed, recommendation, confidence, level)
    return gate, replace(recommendation, judged=how)


def judge_forecasts(
    forecasts: Sequence[Forecast], gate: Gate | None, confidence: float
) -> tuple[Gate | None, Recommendation]:
    """Return the judged gate, if there is one, and the recommendation of forecasts for llama.cpp.

    A drafter with one γ passes in a setting if the lower of its `bounds` is above `min_speedup` (1 if None). The
    recommended one has the highest of its least bounds over all settings.
    """
    least = 1.0 if gate is None or gate.min_speedup is None else gate.min_speedup
    by_setting: dict[Setting, dict[Configuration, Forecast]] = {}
    for one in forecasts:
        by_setting.setdefault((one.temperature, one.slots), {})[one.proposer, one.draft_length] = one

    def bound(one: Forecast) -> tuple[float, float]:
        return one.bounds[0] if one.bounds else 0.0, one.speedup.value or 0.0

    def verdict(one: Forecast) -> SettingVerdict:
        go, speedup = bound(one)[0] > least, replace(one.speedup, ci95=one.bounds)
        times = intervals.format_estimate(speedup, spread="interval")
        reason = f"{one.proposer} with γ = {one.draft_length} is forecast to decode {times} times as fast as plain "
        reason += f"decoding in llama.cpp (T = {one.temperature:g}, {one.slots} at once)"
        why_not = f"a {SPEEDUP} {least:g} is not certain" if one.bounds else "too few prompts for an interval"
        reason += "." if go else f": {why_not}."
        return SettingVerdict(one.temperature, one.slots, go, reason, one.proposer, one.draft_length, speedup)

    def everywhere(one: Forecast) -> list[Forecast]:
        return [of[key] for of in by_setting.values() if (key := (one.proposer, one.draft_length)) in of]

    verdicts = [verdict(max(of.values(), key=bound)) for of in by_setting.values()]
    best = max(forecasts, key=lambda one: (len(everywhere(one)), min(map(bound, everywhere(one)))))
    slowest = verdict(min(everywhere(best), key=bound))
    pays = " ".join(verdict.reason for verdict in verdicts if verdict.go and gate is None)
    reason = f"Deploy where it pays. {pays}" if pays else f"Don't deploy: {slowest.reason}"
    if gate is not None:
        parts, failures = [GatePart(f"{SPEEDUP} {least:g}", slowest.go)], [] if slowest.go else [slowest.reason]
        gate = replace(gate, passed=slowest.go, failures=failures, parts=parts)
    return gate, Recommendation(
        slowest.go,
        slowest.reason if slowest.go else reason,
        *slowest.key,
        predicted_speedup=slowest.speedup,
        judged=f"The highest lower bound of {len(forecasts)} forecasts, by Student's intervals over prompts that hold "
        f"together at {100 * confidence:.4g}%. Prices err by some per cent more.",
        settings=verdicts,
    )


def _how_judged(runs: Sequence[Run], recommendation: Recommendation, confidence: float, level: float) -> str:
    settings = len({run.setting for run in runs})
    if len(runs) == 1:
        words = f"One drafter with one γ was measured, and judged by Student's interval at {_level(level)}"
    else:
        every = "" if settings == 1 else f" in each of {settings} settings (temperature and batch size)"
        words = (
            f"The best of {len(runs) // settings} drafters and γ was taken{every}. Each run was judged by Student's "
            f"interval at {_level(level)}, so that all hold together at {100 * confidence:.4g}%"
        )
        if len(runs) > settings:
            words += ". The speed-ups in the verdicts come from prompts that were not used to choose"
    best = {(recommendation.proposer, recommendation.draft_length)}
    best |= {(verdict.proposer, verdict.draft_length) for verdict in recommendation.settings}
    tested = {
        (run.temperature, run.proposer.name): f"at T = {run.temperature:g} the distribution of {run.proposer.name}'s "
        f"text was tested on {run.lossless.tokens:,} tokens (p = {run.lossless.p_value:.2g})"
        for run in runs
        if run.lossless.p_value is not None and run.lossless.tokens is not None and run.key[:2] in best
    }
    return "; ".join([words, *tested.values()]) + "."


def _speed(run: Run) -> float:
    """Return the speed-up, or α for a server without a baseline."""
    return next((e.value for e in (run.speedup, run.alpha) if e is not None and e.value is not None), 0.0)


def _unbiased(run: Run, rivals: Rivals, observations: Observations, count: int) -> Estimate:
    """Return the speed-up of the best configuration's run, corrected for the choice; `count` runs share the level."""
    by_setting = {c: {rival.setting: rival for rival in runs} for c, runs in rivals.items()}
    by_setting = {c: runs for c, runs in by_setting.items() if run.setting in runs}
    bounds = bounds_of(run, observations, intervals.confidence_of_each(0.95, count))
    value = None
    if len(by_setting) > 1:
        times = {
            c: {s: Timed.of(*_pair(rival, observations)) for s, rival in runs.items()} for c, runs in by_setting.items()
        }
        value = held_out_speedup(times, run.setting)
    value = run.speedup.value if value is None else value
    # A few held-out batches vary widely: their value is kept within the run's own interval.
    if value is not None and bounds is not None:
        value = min(max(value, bounds[0]), bounds[1])
    return replace(run.speedup, value=value, ci95=bounds)


def _pair(run: Run, observations: Observations) -> tuple[Observation, Observation]:
    return observations[*run.setting, Method(*run.key[:2])], observations[*run.setting, Method()]


def bounds_of(run: Run, observations: Observations, confidence: float) -> Interval | None:
    """Return the interval of a run's speed-up at a level; None without plain decoding."""
    if (*run.setting, Method()) not in observations:
        return None
    own, plain = _pair(run, observations)
    return own.speedup_interval(plain, confidence)


def level_words(confidence: float) -> str:
    """Return the level at which all intervals of a verdict hold together, in words; empty for 95 %."""
    return "" if confidence == 0.95 else f", all intervals at {_level(confidence)}"


def _below(what: str, estimate: Estimate, unit: str, least: float, confidence: float, run: Run) -> list[str]:
    """Return why an estimate's lower end does not exceed a bound, in one sentence or none."""
    if estimate.ci95 is None:
        counted = f"{estimate.n} {unit}"
        if estimate.n < LEAST:
            return [f"{counted} of {_where(run)}, are too few for {_level(confidence)}, which needs {LEAST}"]
        return [f"of {counted} some have no token, so that there is no interval, of {_where(run)}"]
    low, high = estimate.ci95
    if low > least:
        return []
    words = f"{estimate.value:.2f} [{low:.2f}, {high:.2f}]"
    if what.endswith(GAIN):
        words = f"{estimate.value:+.2f}, at least {low:+.2f},"
    return [f"{what} must exceed {least:g} with {_level(confidence)}, and is {words} for {_where(run)}"]


def _departs(run: Run, require_test: bool) -> list[str]:
    """Return why a run's text is not known to be the target's."""
    if run.lossless.passed is False:
        return [f"the text is not the target's, for {_where(run)}: {run.lossless.reason}"]
    if require_test and run.temperature > 0 and not run.lossless.checked:
        return [f"the distribution of the text was not tested, for {_where(run)}: {run.lossless.reason}"]
    return []


def _where(run: Run) -> str:
    return Method(*run.key[:2]).at(run.temperature, run.batch_size)


def _level(confidence: float) -> str:
    return f"{100 * confidence:.4g}% confidence"
