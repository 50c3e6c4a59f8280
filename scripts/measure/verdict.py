"""From a report's figures to what to do: comparisons, the recommended setting and the gate."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import ceil

from scipy.stats import norm

from draftsmith.decode.measurement.intervals import (
    LEAST,
    Estimate,
    Interval,
    confidence_of_each,
    format_estimate,
    ratio_difference,
)
from draftsmith.scripts.kinds import STOCK
from draftsmith.scripts.measure.estimates import speedup_interval
from draftsmith.scripts.measure.state import Method, Observations, Replays
from draftsmith.scripts.measure.winner import Timed, held_out_speedup
from draftsmith.scripts.report.types import Comparison, Gate, GatePart, Recommendation, Run

Gains = Mapping[tuple[float, str, int], tuple[Estimate, Interval | None]]
"""By temperature, drafter and γ: the gain of τ over the stock draft, and its interval at the level of each setting."""
Settings = Mapping[tuple[str, int], Sequence[Run]]
"""The runs at each temperature and batch size, by drafter and γ: by what a server is configured with."""
MOST_PROMPTS = 100_000
POWER = ((norm.ppf(0.975) + norm.ppf(0.8)) / norm.ppf(0.975)) ** 2
"""How many times the prompts whose 95 % interval would end at zero: with these it excludes zero in 80 % of cases."""


def more_prompts(difference: Estimate, prompts: int) -> int | None:
    """Return how many further prompts would separate two drafters in four of five cases, if the difference is true.

    An interval narrows with the square root of the prompts. 0 if the interval excludes zero already; None if the
    drafters are equal, or more than `MOST_PROMPTS` would be needed.
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
                name, other = other, name  # being ahead of the stock draft reads as a gain
            first, second = by_name[name], by_name[other]
            alpha = ratio_difference(*first.overlaps_and_contexts(), *second.overlaps_and_contexts())
            for k in draft_lengths:
                if k in first.draft_lengths and k in second.draft_lengths:
                    length = ratio_difference(*first.tokens_and_rounds(k), *second.tokens_and_rounds(k))
                    more = more_prompts(length, len(first.texts))
                    compared.append(Comparison(temperature, verifier, k, name, other, length, alpha, more))
    return compared


def candidates(runs: Sequence[Run], min_gain: float | None) -> Settings:
    """Return the settings that may be deployed: not the stock draft where a gain over it is asked for."""
    settings: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        if min_gain is None or run.proposer.kind != "baseline_draft":
            settings.setdefault((run.proposer.name, run.draft_length), []).append(run)
    return settings


def judge(
    runs: Sequence[Run],
    observations: Observations,
    gains: Gains,
    min_speedup: float | None,
    min_gain: float | None,
    confidence: float,
    advice: str | None,
    require_law: bool = True,
) -> tuple[Gate | None, Recommendation]:
    """Return the gate, None where none was asked for, and the recommendation.

    A setting is a drafter with one γ: a server takes exactly these. It passes if, at every temperature and batch size
    that was measured, the lower bound of its speed-up is above `min_speedup` (1 if None) and that of its gain above
    `min_gain`. One setting of several is enough. So each is judged at a level at which the bounds of all hold together,
    and the speed-up of the best is reported on prompts that did not choose it.

    Args:
        runs: the report's.
        observations: what they were decoded in.
        gains: over the stock draft, with intervals at `confidence_of_each(confidence, …)` of the candidates.
        min_speedup: what the speed-up must exceed; no gate on it if None.
        min_gain: what the gain of τ over the stock draft must exceed; no gate on it if None.
        confidence: level at which all intervals hold together.
        advice: a sentence to end the reason with.
        require_law: recommend no setting whose text was sampled without a test of its law.
    """
    settings = candidates(runs, min_gain)
    least, level = 1.0 if min_speedup is None else min_speedup, confidence_of_each(confidence, len(settings))
    slow = {s: [line for run in of for line in _slow(run, observations, least, level)] for s, of in settings.items()}
    less = {s: [line for run in of for line in _gains_less(run, gains, min_gain, level)] for s, of in settings.items()}
    departing = {s: [line for run in of for line in _departs(run, require_law)] for s, of in settings.items()}
    failures = {setting: [*slow[setting], *less[setting], *departing[setting]] for setting in settings}
    slowest = {setting: min(of, key=_speed) for setting, of in settings.items()}
    best = max(settings, key=lambda s: (not failures[s], _speed(slowest[s])), default=None)
    gate = None
    if min_speedup is not None or min_gain is not None:
        failed = ["there is nothing to deploy but the stock draft"] if best is None else failures[best]
        parts = []
        if best is not None:
            parts = [GatePart(f"speed-up above {least:g}", not slow[best])]
            if min_gain is not None:
                parts.append(GatePart(f"gain of τ over the stock draft above {min_gain:g}", not less[best]))
            parts.append(GatePart("lossless text", not departing[best]))
        gate = Gate(min_speedup, min_gain, confidence, passed=not failed, failures=failed, parts=parts)
    if best is None:
        return gate, Recommendation(False, "Nothing but the stock draft was measured.")
    run, go = slowest[best], not failures[best]
    where = f"T = {run.temperature:g}, batch size {run.batch_size}"
    if len(settings[best]) > 1:
        where += f", the least of {len(settings[best])} measured"
    # If the gain or the text decides, the best is the fastest of the settings that are alike in them. A law that was
    # not tested decides nothing: speed alone chooses.
    departs = {s: any(run.lossless.passed is False for run in of) for s, of in settings.items()}
    alike = {s: of for s, of in settings.items() if bool(less[s] or departs[s]) == bool(less[best] or departs[best])}
    speedup = _unbiased(run, alike, observations, len(settings))
    times = format_estimate(speedup, spread="interval")
    sentence = f"{best[0]} with γ = {best[1]} decodes {times} times as fast as plain decoding ({where})"
    if go:
        reason = f"{sentence}."
    elif gate is None and not departing[best]:
        reason = f"Don't deploy: no drafter is certain to be faster than plain decoding. As measured, {sentence}."
    else:
        reason = f"Don't deploy: {failures[best][0]}."
    return gate, Recommendation(
        go,
        " ".join(filter(None, (reason, advice))),
        *run.setting,
        predicted_speedup=run.predicted_speedup,
        measured_speedup=speedup,
        judged=_judged(settings, best, confidence, level),
    )


def _judged(settings: Settings, best: tuple[str, int], confidence: float, level: float) -> str:
    """Say in a sentence how it was judged."""
    if len(settings) == 1:
        words = f"One setting (drafter and γ) was measured, and judged by Student's interval at {_level(level)}"
    else:
        words = (
            f"The best of {len(settings)} settings (drafter and γ) was taken. Each was judged by Student's interval at "
            f"{_level(level)}, so that all hold together at {100 * confidence:.4g}%. The speed-up in the verdict comes "
            "from prompts that were not used to choose the setting"
        )
    tested = {
        run.temperature: f"at T = {run.temperature:g} the distribution of its text was tested on "
        f"{run.lossless.tokens:,} tokens (p = {run.lossless.p_value:.2g})"
        for run in settings[best]
        if run.lossless.p_value is not None and run.lossless.tokens is not None
    }
    return "; ".join([words, *tested.values()]) + "."


def _speed(run: Run) -> float:
    return run.speedup.value or 0.0


def _unbiased(run: Run, settings: Settings, observations: Observations, count: int) -> Estimate:
    """Return the speed-up of a run that is the best of `count` settings, without the luck of the best."""

    def timed(own: Run) -> Timed:
        methods = Method(own.proposer.name, own.draft_length), Method()
        return Timed.of(*(observations[own.temperature, own.batch_size, method] for method in methods))

    condition = run.temperature, run.batch_size
    seen = {s: {(own.temperature, own.batch_size): timed(own) for own in of} for s, of in settings.items()}
    seen = {setting: of for setting, of in seen.items() if condition in of}
    value = run.speedup.value if len(seen) == 1 else held_out_speedup(seen, condition)
    groups, plain = (observations[*condition, method] for method in (Method(*run.setting[:2]), Method()))
    bounds = speedup_interval(groups, plain, confidence_of_each(0.95, count))
    if value is None:
        value = run.speedup.value
    elif bounds is not None:
        value = min(max(value, bounds[0]), bounds[1])
    return replace(run.speedup, value=value, ci95=bounds)


def _slow(run: Run, observations: Observations, least: float, confidence: float) -> list[str]:
    """Return why a run is not fast enough."""
    groups, plain = (
        observations[run.temperature, run.batch_size, method] for method in (Method(*run.setting[:2]), Method())
    )
    bounds = speedup_interval(groups, plain, confidence)
    if bounds is None:
        return [_no_interval(f"{run.speedup.n} batches", run.speedup.n, confidence, run)]
    if bounds[0] > least:
        return []
    return [
        f"the speed-up must exceed {least:g} with {_level(confidence)}, and is {run.speedup.value:.2f} "
        f"[{bounds[0]:.2f}, {bounds[1]:.2f}] for {_where(run)}"
    ]


def _gains_less(run: Run, gains: Gains, min_gain: float | None, confidence: float) -> list[str]:
    """Return why a run does not gain enough over the stock draft."""
    if min_gain is None:
        return []
    gain, interval = gains.get((run.temperature, run.proposer.name, run.draft_length), (None, None))
    if gain is None or gain.value is None:
        return [f"no gain over a stock draft is known for {_where(run)}"]
    if interval is None:
        return [_no_interval(f"{gain.n} prompts", gain.n, confidence, run)]
    if interval[0] > min_gain:
        return []
    return [
        f"the gain of τ over the stock draft must exceed {min_gain:g} with {_level(confidence)}, and is "
        f"{gain.value:+.2f}, at least {interval[0]:+.2f}, for {_where(run)}"
    ]


def _no_interval(counted: str, count: int, confidence: float, run: Run) -> str:
    """Say why there is no interval."""
    if count < LEAST:
        return f"{counted} are too few for {_level(confidence)}, which needs {LEAST}, of {_where(run)}"
    return f"of {counted} some have no token, so that there is no interval, of {_where(run)}"


def _departs(run: Run, require_law: bool) -> list[str]:
    """Return why a run's text is not known to be the target's."""
    if run.lossless.passed is False:
        return [f"the text is not the target's, for {_where(run)}: {run.lossless.reason}"]
    if require_law and run.temperature > 0 and not run.lossless.checked:
        return [f"the distribution of the text was not tested, for {_where(run)}: {run.lossless.reason}"]
    return []


def _where(run: Run) -> str:
    return Method(*run.setting[:2]).at(run.temperature, run.batch_size)


def _level(confidence: float) -> str:
    return f"{100 * confidence:.4g}% confidence"
