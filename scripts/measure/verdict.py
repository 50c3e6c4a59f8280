"""From a report's figures to what to do: comparisons, the recommended setting and the gate."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import ceil

from scipy.stats import norm

from draftsmith.decode.measurement.intervals import LEAST, Estimate, Interval, format_estimate, ratio_difference
from draftsmith.scripts.measure.estimates import speedup_interval
from draftsmith.scripts.measure.side_by_side import Method, Observations
from draftsmith.scripts.measure.state import Replays
from draftsmith.scripts.pair import STOCK
from draftsmith.scripts.report.types import Comparison, Gate, Recommendation, Run

Gains = Mapping[tuple[float, str, int], tuple[Estimate, Interval | None]]
"""By temperature, drafter and γ: the gain of τ over the stock draft, and its interval at the gate's level."""
MOST_PROMPTS = 100_000
POWER = ((norm.ppf(0.975) + norm.ppf(0.8)) / norm.ppf(0.975)) ** 2
"""How many times the prompts whose 95 % interval would end at zero: with these it excludes zero in 80 % of cases."""


def more_prompts(difference: Estimate, prompts: int) -> int | None:
    """Return how many further prompts would tell two drafters apart, in four of five cases were the difference true.

    An interval narrows with the root of the prompts. 0 where they are told apart already; None where they are equal, or
    too nearly so for any number to do.
    """
    value, bounds = difference.value, difference.ci95
    if not value or bounds is None:
        return None
    if bounds[0] > 0 or bounds[1] < 0:
        return 0
    half = max(bounds[1] - value, value - bounds[0])
    wanted = ceil(prompts * POWER * (half / abs(value)) ** 2)
    return max(1, wanted - prompts) if wanted <= MOST_PROMPTS else None


def comparisons(replays: Replays, draft_lengths: Sequence[int]) -> list[Comparison]:
    """Compare drafters two by two on the same texts, paired over prompts, at each draft length that both have."""
    compared = []
    for temperature, verifier in dict.fromkeys((t, verifier) for t, _, verifier in replays):
        by_name = {name: r for (t, name, v), r in replays.items() if (t, v) == (temperature, verifier)}
        for name, other in combinations(by_name, 2):
            if name == STOCK:
                name, other = other, name  # what is ahead of the stock draft reads as a gain
            first, second = by_name[name], by_name[other]
            alpha = ratio_difference(*first.overlaps_and_contexts(), *second.overlaps_and_contexts())
            for k in draft_lengths:
                if k in first.draft_lengths and k in second.draft_lengths:
                    length = ratio_difference(*first.tokens_and_rounds(k), *second.tokens_and_rounds(k))
                    more = more_prompts(length, len(first.texts))
                    compared.append(Comparison(temperature, verifier, k, name, other, length, alpha, more))
    return compared


def judge(
    runs: Sequence[Run],
    observations: Observations,
    gains: Gains,
    min_speedup: float | None,
    min_gain: float | None,
    confidence: float,
    advice: str | None,
) -> tuple[Gate | None, Recommendation]:
    """Return the gate, None where none was asked for, and the recommendation.

    A setting is a drafter with one γ, for that is what a server is given. It must hold at every temperature and batch
    size that was measured: its speed-up's lower bound above `min_speedup` (1 if None), its gain's above `min_gain`.

    Args:
        runs: the report's.
        observations: what they were decoded in.
        gains: over the stock draft, with intervals at `confidence`.
        min_speedup: what the speed-up must exceed; no gate on it if None.
        min_gain: what the gain of τ over the stock draft must exceed; no gate on it if None.
        confidence: level of the intervals.
        advice: a sentence to end the reason with.
    """
    settings: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        settings.setdefault((run.proposer.name, run.draft_length), []).append(run)
    least = 1.0 if min_speedup is None else min_speedup
    failures = {
        setting: [line for run in of for line in _failures(run, observations, gains, least, min_gain, confidence)]
        for setting, of in settings.items()
    }
    # The stock draft is what is to be beaten, not what is to be deployed, wherever a gain over it is asked for.
    open_to = [s for s in settings if min_gain is None or settings[s][0].proposer.kind != "baseline_draft"]
    slowest = {s: min(settings[s], key=_speed) for s in open_to}
    best = max(open_to, key=lambda s: (not failures[s], _speed(slowest[s])), default=None)
    gate = None
    if min_speedup is not None or min_gain is not None:
        failed = ["there is nothing to deploy but the stock draft"] if best is None else failures[best]
        gate = Gate(min_speedup, min_gain, confidence, passed=not failed, failures=failed)
    if best is None:
        return gate, Recommendation(False, "Nothing but the stock draft was measured.")
    run, go = slowest[best], not failures[best]
    where = f"T = {run.temperature:g}, batch size {run.batch_size}"
    if len(settings[best]) > 1:
        where += f", the least of {len(settings[best])} measured"
    times = format_estimate(run.speedup, spread="interval")
    sentence = f"{best[0]} with γ = {best[1]} decodes {times} times as fast as plain decoding ({where})"
    if go:
        reason = f"{sentence}."
    elif gate is None and all(run.lossless.passed is not False for run in settings[best]):
        reason = f"Don't deploy: no drafter is faster than plain decoding for certain. The best, {sentence}."
    else:
        reason = f"Don't deploy: {failures[best][0]}."
    return gate, Recommendation(
        go,
        " ".join(filter(None, (reason, advice))),
        *run.setting,
        predicted_speedup=run.predicted_speedup,
        measured_speedup=run.speedup,
    )


def _speed(run: Run) -> float:
    return run.speedup.value or 0.0


def _failures(
    run: Run,
    observations: Observations,
    gains: Gains,
    least: float,
    min_gain: float | None,
    confidence: float,
) -> list[str]:
    """Return what keeps a run from being deployed."""
    name, k, rows, temperature = run.setting
    level, where = f"{confidence:.0%} confidence", f"{name}, γ = {k}, at T = {temperature:g}, batch size {rows}"
    groups, plain = (observations[temperature, rows, method] for method in (Method(name, k), Method()))
    failures = []
    bounds = speedup_interval(groups, plain, confidence)
    if bounds is None:
        failures.append(f"{run.speedup.n} batches are too few for {level}, which needs {LEAST}, of {where}")
    elif bounds[0] <= least:
        failures.append(
            f"the speed-up must exceed {least:g} with {level}, and is {run.speedup.value:.2f} [{bounds[0]:.2f}, "
            f"{bounds[1]:.2f}] for {where}"
        )
    if min_gain is not None:
        gain, interval = gains.get((temperature, name, k), (None, None))
        if gain is None or gain.value is None:
            failures.append(f"no gain over a stock draft is known for {where}")
        else:
            low, _ = interval or (float("-inf"), float("inf"))
            if interval is None:
                failures.append(f"{gain.n} prompts are too few for {level}, which needs {LEAST}, of {where}")
            elif low <= min_gain:
                failures.append(
                    f"the gain of τ over the stock draft must exceed {min_gain:g} with {level}, and is "
                    f"{gain.value:+.2f}, at least {low:+.2f}, for {where}"
                )
    if run.lossless.passed is False:
        failures.append(f"the text is not the target's, for {where}: {run.lossless.reason}")
    return failures
