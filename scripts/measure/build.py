"""The report of one run, built from decoded and replayed texts, or from a server's answers."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch

from draftsmith.decode import Counts, Replay, clock
from draftsmith.decode.measurement import intervals
from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.scripts.kinds import STOCK
from draftsmith.scripts.measure import predictions
from draftsmith.scripts.measure.estimates import Observation, Observations, emitted_and_rounds, rows_of, same_length
from draftsmith.scripts.measure.state import PROBABILISTIC, REPEATS, Measured, Method, Row
from draftsmith.scripts.measure.verdict import candidates, comparisons, judge_forecasts, judge_runs, partial
from draftsmith.scripts.report import types as report
from draftsmith.scripts.report.entries import RunGroup
from draftsmith.train.kinds.drafter import Drafter
from draftsmith.train.models import load_config
from draftsmith.train.provenance import environment
from draftsmith.train.quantization import parameter_count, quantization_of

Verdict = tuple[report.Gate | None, report.Recommendation]


def build_report(
    runs: Sequence[report.Run],
    observations: Observations,
    verdict: Verdict,
    failures: Sequence[report.Failure],
    **entries: Any,
) -> report.Report:
    """Return the report of decoded texts or of a server's answers; a value that was not measured is None.

    Intervals are bootstrapped over prompts, those of a server's throughput over turns; comparisons are paired.
    `entries` are the report's others.
    """
    plain = {(t, b): observation for (t, b, method), observation in observations.items() if method == Method()}
    baselines = [report.PlainRun(*setting, own.speed(), own.repeated()) for setting, own in plain.items()]
    whole = Observation(
        [tokens for own in plain.values() for tokens in own.tokens],
        [seconds for own in plain.values() for seconds in own.seconds],
    )
    gate, recommendation = partial(*verdict, failures)
    return report.Report(
        baseline=report.Baseline(whole.speed(), baselines) if plain else None,
        runs=runs,
        gate=gate,
        recommendation=recommendation,
        failures=failures,
        **entries,
    )


def by_group(
    groups: Mapping[str, Sequence[int]],
    measured: frozenset[int],
    own: Observation,
    plain: Observation | None,
    length: Callable[[Set[int]], Estimate],
) -> dict[str, RunGroup]:
    """Return a run's figures for each group of prompts that has measured ones; `length` returns τ of some prompts."""
    return {
        name: RunGroup(len(prompts), length(prompts), own.within(prompts).speedup(plain and plain.within(prompts)))
        for name, indices in groups.items()
        if (prompts := measured.intersection(indices))
    }


def measured_report(measured: Measured) -> report.Report:
    """Return the report of decoded and replayed texts."""
    config, pair, compiled = measured.config, measured.pair, bool(measured.config.compiled)
    stored = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
    runs, observations = _runs(measured), _observations(measured)
    curves = [predictions.curve_of(measured, *key, replay) for key, replay in measured.replays.items()]
    plain = [own for (_, _, method), own in observations.items() if method == Method()]
    count = max((len(own.texts or ()) for own in plain), default=len(measured.prompts))
    categories = {name: len(indices) for name, indices in measured.categories().items()}
    return build_report(
        runs,
        observations,
        _verdict(measured, runs),
        measured.failures,
        environment=report.Environment(
            **environment(pair.target.device, pair.dtype),
            compiled=compiled,
            timed=clock.turns_taken(measured.compared, REPEATS) if runs else None,
            compilation_seconds=round(sum(clock.PROGRAMS), 1) if compiled else None,
        ),
        target=report.Target(
            config.target,
            parameter_count(pair.target),
            pair.dtype,
            config.filters(),
            pair.left_out,
            quantization_of(pair.target.config) or quantization_of(stored),
        ),
        prompts=report.Prompts(config.prompts, count, len(measured.prompts), categories),
        curves=curves,
        comparisons=comparisons(
            measured.replays,
            sorted({run.draft_length for run in runs} | {one.draft_length for one in measured.forecasts}),
        ),
        costs=predictions.costs_entry(measured),
        by_load=predictions.by_load(measured),
        forecasts=measured.forecasts,
    )


def recommend(measured: Measured) -> report.Recommendation:
    """Return the recommendation as if every sampled text's distribution had been tested."""
    return partial(*_verdict(measured, _runs(measured), require_test=False), measured.failures)[1]


def _observations(measured: Measured) -> Observations:
    return {key: _observation(measured, *key) for key in measured.observations}


def _observation(measured: Measured, temperature: float, batch_size: int, method: Method) -> Observation:
    """Return what was decoded, and where the replay agrees with it, the rounds that are expected of all texts."""
    groups = measured.observations[temperature, batch_size, method]
    replay = measured.replays.get((temperature, method.drafter, PROBABILISTIC))
    if replay is None or _agrees(measured, replay, rows_of(groups), method, temperature) is False:
        return Observation.of(groups)
    return Observation.of(groups, dict(enumerate(zip(*replay.tokens_and_rounds(method.draft_length), strict=True))))


def _runs(measured: Measured) -> list[report.Run]:
    return [_run(measured, *key) for key in measured.observations if key[2] != Method()]


def _verdict(measured: Measured, runs: Sequence[report.Run], require_test: bool = True) -> Verdict:
    config, gate = measured.config, None
    level = intervals.confidence_of_each(config.confidence, len(candidates(runs, config.min_gain)))
    gains = {run.key: _gain(measured, run.temperature, Method(*run.key[:2]), level) for run in runs}
    if config.min_speedup is not None or config.min_gain is not None:
        gate = report.Gate(config.min_speedup, config.min_gain, config.confidence)
    if measured.forecasts:
        return judge_forecasts(measured.forecasts, gate, config.confidence)
    return judge_runs(runs, _observations(measured), gains, gate, config.confidence, require_test)


def _run(measured: Measured, temperature: float, batch_size: int, method: Method) -> report.Run:
    setting = temperature, batch_size
    groups = measured.observations[*setting, method]
    own, plain = (_observation(measured, *setting, which) for which in (method, Method()))
    drafter, rows = measured.drafter(method.drafter), rows_of(groups)
    counts = sum((row.counts for row in rows), Counts())
    replay = measured.replays.get((temperature, drafter.name, PROBABILISTIC))
    decoded = frozenset(row.prompt for row in rows)

    def length(prompts: Set[int]) -> Estimate:
        return intervals.ratio(*emitted_and_rounds([row for row in rows if row.prompt in prompts]))

    return report.Run(
        proposer=report.ProposerEntry(**drafter.to_dict()),
        draft_length=method.draft_length,
        temperature=temperature,
        batch_size=batch_size,
        counts=counts,
        alpha=None if replay is None else replay.alpha,
        draft_acceptance_rate=intervals.ratio(
            [row.counts.num_accepted_tokens for row in rows], [row.counts.num_draft_tokens for row in rows]
        ),
        mean_acceptance_length=length(decoded),
        acceptance_per_position=counts.acceptance_per_position(),
        conditional_acceptance=counts.conditional_acceptance(),
        speedup=own.speedup(plain),
        predicted_speedup=predictions.predicted_speedup(
            measured, temperature, drafter, method.draft_length, len(groups[0].rows)
        ),
        tokens_per_second=own.speed(),
        gain_over_baseline_draft=_gains(measured, setting, method),
        replay=None
        if replay is None
        else report.ReplayedLength(
            replay.mean_acceptance_length[method.draft_length], _agrees(measured, replay, rows, method, temperature)
        ),
        lossless=measured.lossless[*setting, method],
        by_category=by_group(measured.categories(), decoded, own, plain, length),
        repeated_ngram_share=own.repeated(),
        sources=_sources(drafter, rows),
    )


def _sources(drafter: Drafter, rows: Sequence[Row]) -> dict[str, Counts] | None:
    """Return the counts of each member of a drafter whose members take turns, by name."""
    if not drafter.members:
        return None
    by_row = [row.sources or [row.counts] for row in rows]  # a row of a single drafter has no sources
    return {
        name: Counts.total(counts[index] for counts in by_row if index < len(counts))
        for index, name in enumerate(drafter.sources)
    }


def _gain(measured: Measured, temperature: float, method: Method, confidence: float | None = None) -> Estimate | None:
    """Return the gain of a drafter's replayed τ over the stock draft's; `confidence` is its interval's, if not 95 %.

    Both are replayed on the same texts, at the same γ. None if the two cannot be compared.
    """
    replay = measured.replays.get((temperature, method.drafter, PROBABILISTIC))
    stock, k = measured.replays.get((temperature, STOCK, PROBABILISTIC)), method.draft_length
    if replay is None or stock is None or method.drafter == STOCK or k not in stock.draft_lengths:
        return None
    columns = *replay.tokens_and_rounds(k), *stock.tokens_and_rounds(k)
    gain = intervals.ratio_difference(*columns)
    if confidence is None:
        return gain
    return replace(gain, ci95=intervals.difference_interval(*columns, confidence=confidence))


def _gains(measured: Measured, setting: tuple[float, int], method: Method) -> report.Gains | None:
    stock = Method(STOCK, method.draft_length)
    baseline = measured.observations.get((*setting, stock))
    if baseline is None or method.drafter == STOCK:
        return None
    # Replay has both draft the same texts; decoded gains also vary with the texts that each happened to write.
    gain, own = _gain(measured, setting[0], method) or Estimate(None, None, 0), measured.observations[*setting, method]
    decoded = intervals.ratio_difference(*emitted_and_rounds(rows_of(own)), *emitted_and_rounds(rows_of(baseline)))
    faster = _observation(measured, *setting, method).speedup(_observation(measured, *setting, stock))
    return report.Gains(gain, decoded, faster)


def _agrees(measured: Measured, replay: Replay, rows: Sequence[Row], method: Method, temperature: float) -> bool | None:
    """Return whether the replayed τ of the target's texts agrees with the decoder's; None for too few prompts.

    At T=0 both count the same texts, and the rounds of each prompt must be equal. Sampled texts differ, and in half
    precision of target or drafter the parallel forward breaks near-ties otherwise: `same_length` then compares them, in
    one test over all runs.
    """
    tokens, rounds = replay.tokens_and_rounds(method.draft_length)
    if _replays_exactly(measured, temperature, method):
        return all(row.counts.num_drafts == rounds[row.prompt] for row in rows)
    replayed = [tokens[row.prompt] for row in rows], [rounds[row.prompt] for row in rows]
    num_tests = sum(
        method != Method()
        and (t, method.drafter, PROBABILISTIC) in measured.replays
        and not _replays_exactly(measured, t, method)
        for t, _, method in measured.observations
    )
    return same_length(emitted_and_rounds(rows), replayed, num_tests)


def _replays_exactly(measured: Measured, temperature: float, method: Method) -> bool:
    """Return whether replay must count the decoder's rounds: at T=0, with target and drafter in dtypes without ties."""
    models = measured.pair.target, measured.drafter(method.drafter).model
    return temperature == 0 and all(m is None or m.dtype in (torch.float32, torch.float64) for m in models)
