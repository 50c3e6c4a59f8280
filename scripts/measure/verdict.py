"""From a report's figures to what to do: comparisons, the recommended setting, the gate, and a summary in markdown."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import ceil
from typing import Any

from scipy.stats import norm

from draftsmith.decode.measurement.intervals import Estimate, Interval, format_estimate, ratio_difference
from draftsmith.scripts.measure.estimates import speedup_interval
from draftsmith.scripts.measure.side_by_side import Method, Observations
from draftsmith.scripts.measure.state import Replays
from draftsmith.scripts.pair import STOCK

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


def comparisons(replays: Replays, draft_lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Compare drafters two by two on the same texts, paired over prompts, at each draft length that both have."""
    found = []
    for temperature, verifier in dict.fromkeys((t, verifier) for t, _, verifier in replays):
        own = {name: r for (t, name, v), r in replays.items() if (t, v) == (temperature, verifier)}
        for name, other in combinations(own, 2):
            if name == STOCK:
                name, other = other, name  # what is ahead of the stock draft reads as a gain
            first, second = own[name], own[other]
            for k in draft_lengths:
                if k not in first.draft_lengths or k not in second.draft_lengths:
                    continue
                length = ratio_difference(*first.tokens_and_rounds(k), *second.tokens_and_rounds(k))
                found.append(
                    {
                        "temperature": temperature,
                        "verifier": verifier,
                        "draft_length": k,
                        "proposer": name,
                        "other": other,
                        "mean_acceptance_length": length,
                        "alpha": ratio_difference(*first.overlaps_and_contexts(), *second.overlaps_and_contexts()),
                        "more_prompts": more_prompts(length, len(first.texts)),
                    }
                )
    return found


def judge(
    runs: Sequence[Mapping[str, Any]],
    observations: Observations,
    gains: Gains,
    min_speedup: float | None,
    min_gain: float | None,
    confidence: float,
    advice: str | None,
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
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
    settings: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for run in runs:
        settings.setdefault((run["proposer"]["name"], run["draft_length"]), []).append(run)
    least = 1.0 if min_speedup is None else min_speedup
    judged = {
        setting: [line for run in own for line in _failures(run, observations, gains, least, min_gain, confidence)]
        for setting, own in settings.items()
    }
    # The stock draft is what is to be beaten, not what is to be deployed, wherever a gain over it is asked for.
    open_to = [s for s in settings if min_gain is None or settings[s][0]["proposer"]["kind"] != "baseline_draft"]
    slowest = {s: min(settings[s], key=_speed) for s in open_to}
    best = max(open_to, key=lambda s: (not judged[s], _speed(slowest[s])), default=None)
    gate = None
    if min_speedup is not None or min_gain is not None:
        failures = ["there is nothing to deploy but the stock draft"] if best is None else judged[best]
        asked = {"min_speedup": min_speedup, "min_gain": min_gain, "confidence": confidence}
        gate = {**asked, "passed": not failures, "failures": failures}
    if best is None:
        return gate, {
            "go": False, "proposer": None, "draft_length": None, "batch_size": None, "temperature": None,
            "predicted_speedup": None, "measured_speedup": None, "reason": "Nothing but the stock draft was measured.",
        }  # fmt: skip
    run, go = slowest[best], not judged[best]
    where = f"T = {run['temperature']:g}, batch size {run['batch_size']}"
    if len(settings[best]) > 1:
        where += f", the least of {len(settings[best])} measured"
    times = format_estimate(run["speedup"], spread="interval")
    said = f"{best[0]} with γ = {best[1]} decodes {times} times as fast as plain decoding ({where})"
    if go:
        reason = f"{said}."
    elif gate is None and all(own["lossless"].get("passed") is not False for own in settings[best]):
        reason = f"Don't deploy: no drafter is faster than plain decoding for certain. The best, {said}."
    else:
        reason = f"Don't deploy: {judged[best][0]}."
    return gate, {
        "go": go,
        "proposer": best[0],
        "draft_length": best[1],
        "batch_size": run["batch_size"],
        "temperature": run["temperature"],
        "predicted_speedup": run["predicted_speedup"],
        "measured_speedup": run["speedup"],
        "reason": " ".join(filter(None, (reason, advice))),
    }


def _speed(run: Mapping[str, Any]) -> float:
    return run["speedup"].value or 0.0


def _failures(
    run: Mapping[str, Any],
    observations: Observations,
    gains: Gains,
    least: float,
    min_gain: float | None,
    confidence: float,
) -> list[str]:
    """Return what keeps a run from being deployed."""
    name, k, temperature, rows = run["proposer"]["name"], run["draft_length"], run["temperature"], run["batch_size"]
    own = observations[temperature, rows, Method(name, k)]
    level, where = f"{confidence:.0%} confidence", f"{name}, γ = {k}, at T = {temperature:g}, batch size {rows}"
    found = []
    bounds = speedup_interval(own, observations[temperature, rows, Method()], confidence)
    if bounds is None:
        found.append(f"one batch alone was decoded by {where}: {level} needs more")
    elif bounds[0] <= least:
        found.append(
            f"the speed-up must exceed {least:g} with {level}, and is {run['speedup'].value:.2f} [{bounds[0]:.2f}, "
            f"{bounds[1]:.2f}] for {where}"
        )
    if min_gain is not None:
        gained, interval = gains.get((temperature, name, k), (None, None))
        if gained is None or gained.value is None:
            found.append(f"no gain over a stock draft is known for {where}")
        else:
            low, _ = interval or (float("-inf"), float("inf"))
            if low <= min_gain:
                found.append(
                    f"the gain of τ over the stock draft must exceed {min_gain:g} with {level}, and is "
                    f"{gained.value:+.2f}, at least {low:+.2f}, for {where}"
                )
    if run["lossless"].get("passed") is False:
        found.append(f"the text is not the target's, for {where}: {run['lossless']['reason']}")
    return found


def markdown(report: Mapping[str, Any]) -> str:
    """Return a summary that a pull request can show: the verdict, the runs, the settings."""
    chosen, gate = report["recommendation"], report["gate"]
    word = "GO" if chosen["go"] else "NO-GO"
    lines = [f"## draftsmith: {word}", "", chosen["reason"], ""]
    if gate is not None:
        asked = [f"speed-up above {gate['min_speedup']:g}"] if gate["min_speedup"] is not None else []
        asked += [f"gain of τ over stock above {gate['min_gain']:g}"] if gate["min_gain"] is not None else []
        lines += [f"Gate: {' and '.join(asked)}, {gate['confidence']:.0%} confidence: "]
        lines[-1] += "passed." if gate["passed"] else "failed."
        lines += [f"* {failure}" for failure in gate["failures"]]
        lines.append("")
    lines += ["| T | B | drafter | γ | α | τ | speed-up | predicted |", "|---|---|---|---|---|---|---|---|"]
    for run in report["runs"]:
        cells = [
            f"{run['temperature']:g}", str(run["batch_size"]), run["proposer"]["name"], str(run["draft_length"]),
            format_estimate(run["alpha"], spread="none"),
            format_estimate(run["mean_acceptance_length"], spread="interval"),
            format_estimate(run["speedup"], unit="×", spread="interval"),
            format_estimate(run["predicted_speedup"], unit="×", spread="none"),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    environment, prompts = report["environment"], report["prompts"]
    lines += [
        "",
        f"{prompts['count']} prompts decoded, {prompts['replayed']} replayed; {environment['device']}, "
        f"{environment['dtype']}, {environment['threads']} threads. τ: tokens a target forward, bonus included; 95 % "
        "intervals over prompts.",
    ]
    return "\n".join(lines) + "\n"
