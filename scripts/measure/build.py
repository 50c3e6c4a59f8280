"""From what was decoded and replayed to the report."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from draftsmith.decode import Counts, Replay, clock
from draftsmith.decode.cache import cached_numbers
from draftsmith.decode.measurement.intervals import (
    Estimate,
    Interval,
    confidence_of_each,
    difference_interval,
    ratio,
    ratio_difference,
)
from draftsmith.decode.repetition import repeated_ngram_share
from draftsmith.scripts.kinds import STOCK
from draftsmith.scripts.measure.estimates import emitted_and_rounds, rows_of, same_length, speed, speedup
from draftsmith.scripts.measure.predictions import (
    advice,
    by_load,
    costs_entry,
    curve_of,
    planner_check,
    predicted_speedup,
)
from draftsmith.scripts.measure.rejections import rejections_of
from draftsmith.scripts.measure.state import PLAIN, PROBABILISTIC, Group, Measured, Method, Row
from draftsmith.scripts.measure.verdict import candidates, comparisons, judge_runs, partial
from draftsmith.scripts.report.cost_types import DrafterMemory, Memory
from draftsmith.scripts.report.types import (
    SCHEMA,
    Baseline,
    Curve,
    Environment,
    Gains,
    Gate,
    PlainRun,
    Prompts,
    ProposerEntry,
    Recommendation,
    ReplayedLength,
    Report,
    Run,
    RunCategory,
    Target,
)
from draftsmith.train.kinds.drafter import Drafter, Pair
from draftsmith.train.provenance import environment


def build_report(measured: Measured) -> Report:
    """Return the report of one run of `measure`; what is not measured is None.

    Intervals are bootstrapped over prompts; comparisons are paired over prompts.
    """
    config, pair, settings = measured.config, measured.pair, measured.chosen
    plain = {(t, b): groups for (t, b, method), groups in measured.observations.items() if method == Method()}
    runs = _runs(measured)
    curves = [curve_of(measured, *key, replay) for key, replay in measured.replays.items()]
    lengths = sorted({run.draft_length for run in runs})
    gate, recommendation = _judged(measured, runs, curves)
    return Report(
        schema=SCHEMA,
        environment=Environment(
            **environment(pair.target.device, pair.dtype),
            compiled=settings.compiled,
            draft_dtypes=sorted(set(settings.draft_dtypes.values())),
            settings_by=settings.why,
            compilation_seconds=round(sum(clock.PROGRAMS), 1) if settings.compiled else None,
        ),
        target=Target(config.target, pair.target.num_parameters(), pair.dtype, config.filters(), pair.left_out),
        prompts=Prompts(
            config.prompts,
            count=max(len(rows_of(groups)) for groups in plain.values()),
            replayed=len(measured.prompts),
            categories={name: len(places) for name, places in measured.categories().items()},
        ),
        baseline=Baseline(
            speed([group for groups in plain.values() for group in groups]),
            [PlainRun(t, b, speed(groups), _repeated(groups)) for (t, b), groups in plain.items()],
        ),
        runs=runs,
        curves=curves,
        comparisons=comparisons(measured.replays, lengths),
        costs=costs_entry(measured),
        planner_check=planner_check(runs),
        memory=_memory(pair),
        rejections=rejections_of(measured),
        trees=measured.trees,
        gate=gate,
        recommendation=recommendation,
        failures=measured.failures,
        by_load=by_load(measured),
    )


def recommended(measured: Measured) -> Recommendation:
    """Return the recommendation as if the law of every sampled text had been tested, without advice."""
    return _judged(measured, _runs(measured), (), require_law=False)[1]


def _runs(measured: Measured) -> list[Run]:
    return [_run(measured, *key, groups) for key, groups in measured.observations.items() if key[2] != Method()]


def _judged(
    measured: Measured, runs: Sequence[Run], curves: Sequence[Curve], require_law: bool = True
) -> tuple[Gate | None, Recommendation]:
    """Return the gate and the recommendation; a partial report is no GO."""
    config, gains = measured.config, {}
    level = confidence_of_each(config.confidence, len(candidates(runs, config.min_gain)))
    for run in runs:
        gain = _gain(measured, run.temperature, Method(run.proposer.name, run.draft_length), level)
        if gain is not None:
            gains[run.temperature, run.proposer.name, run.draft_length] = gain
    asked = None
    if config.min_speedup is not None or config.min_gain is not None:
        asked = Gate(config.min_speedup, config.min_gain, config.confidence, passed=True, failures=[])
    said = advice(curves, runs)
    gate, found = judge_runs(
        runs, measured.observations, gains, asked, config.confidence, said, require_law, config.decides
    )
    return (gate, found) if not measured.failures else partial(gate, found, measured.failures)


def _run(measured: Measured, temperature: float, batch_size: int, method: Method, groups: Sequence[Group]) -> Run:
    """Return the entry of one drafter in one setting, decoded in these batches."""
    drafter, rows = measured.drafter(method.drafter), rows_of(groups)
    counts = sum((row.counts for row in rows), Counts())
    replay = measured.replays.get((temperature, drafter.name, PROBABILISTIC))
    plain = measured.observations[temperature, batch_size, Method()]
    known = replay or measured.first_heads.get((temperature, drafter.name))
    predicting = temperature, drafter, method.draft_length, groups, plain
    return Run(
        proposer=ProposerEntry(**drafter.to_dict()),
        draft_length=method.draft_length,
        rule="exact",
        temperature=temperature,
        batch_size=batch_size,
        counts=counts,
        alpha=None if known is None else known.alpha,
        draft_acceptance_rate=ratio(
            [row.counts.num_accepted_tokens for row in rows], [row.counts.num_draft_tokens for row in rows]
        ),
        mean_acceptance_length=ratio(*emitted_and_rounds(rows)),
        acceptance_per_position=counts.acceptance_per_position(),
        conditional_acceptance=counts.conditional_acceptance(),
        speedup=speedup(groups, plain),
        predicted_speedup=predicted_speedup(measured, *predicting),
        predicted_speedup_without_prompt=predicted_speedup(measured, *predicting, with_prompt=False),
        tokens_per_second=speed(groups),
        gain_over_baseline_draft=_gains(measured, temperature, batch_size, method, groups),
        replay=None if replay is None else _replayed(measured, replay, rows, method.draft_length, temperature),
        lossless=measured.lossless[temperature, batch_size, method],
        by_category=_by_category(measured, groups, plain),
        repeated_ngram_share=_repeated(groups),
        sources=_sources(drafter, rows),
        speedup_over=_speedup_over(measured, temperature, batch_size, drafter, groups),
    )


def _sources(drafter: Drafter, rows: Sequence[Row]) -> dict[str, Counts] | None:
    """Return the counts of each of several drafters that take turns, by name."""
    if not drafter.members:
        return None
    each = [row.sources or [row.counts] for row in rows]  # of one alone nothing is kept apart
    return {
        name: Counts.total(its[place] for its in each if place < len(its)) for place, name in enumerate(drafter.sources)
    }


def _speedup_over(
    measured: Measured, temperature: float, batch_size: int, drafter: Drafter, groups: Sequence[Group]
) -> dict[str, Estimate] | None:
    """Return how much faster than each other drafter one is that takes turns, paired over batches."""
    if not drafter.members:
        return None
    over: dict[str, Estimate] = {}
    for (t, b, method), others in measured.observations.items():
        if (t, b) == (temperature, batch_size) and method.drafter not in (PLAIN, drafter.name):
            found, least = speedup(groups, others), over.get(method.drafter)
            if least is None or (found.value or 0.0) < (least.value or 0.0):
                over[method.drafter] = found
    return over


def _gain(
    measured: Measured, temperature: float, method: Method, confidence: float
) -> tuple[Estimate, Interval | None] | None:
    """Return how much a drafter's replayed τ is above the stock draft's on the same texts, at the same γ.

    Beside the estimate it returns its interval at the confidence level; None where the two cannot be compared.
    """
    replay = measured.replays.get((temperature, method.drafter, PROBABILISTIC))
    stock, k = measured.replays.get((temperature, STOCK, PROBABILISTIC)), method.draft_length
    if replay is None or stock is None or method.drafter == STOCK or k not in stock.draft_lengths:
        return None
    columns = *replay.tokens_and_rounds(k), *stock.tokens_and_rounds(k)
    return ratio_difference(*columns), difference_interval(*columns, confidence=confidence)


def _gains(
    measured: Measured, temperature: float, batch_size: int, method: Method, groups: Sequence[Group]
) -> Gains | None:
    stock = measured.observations.get((temperature, batch_size, Method(STOCK, method.draft_length)))
    if stock is None or method.drafter == STOCK:
        return None
    # Replayed on the same texts for both, without the noise of what each of them happened to decode.
    gain, _ = _gain(measured, temperature, method, 0.95) or (Estimate(None, None, 0), None)
    decoded = ratio_difference(*emitted_and_rounds(rows_of(groups)), *emitted_and_rounds(rows_of(stock)))
    return Gains(gain, decoded, speedup(groups, stock))


def _replayed(measured: Measured, replay: Replay, rows: Sequence[Row], k: int, temperature: float) -> ReplayedLength:
    """Return the replayed τ of the target's texts, and whether that of the decoded prompts' agrees with the decoder's.

    At T=0 both are of the same texts, and the rounds must be equal, prompt by prompt. Under sampling the texts differ,
    and in half precision the parallel forward rounds near-ties otherwise: there `same_length` compares them, in one
    test over all runs of the report.
    """
    tokens, rounds = replay.tokens_and_rounds(k)
    if _replays_exactly(measured, temperature):
        agrees: bool | None = all(row.counts.num_drafts == rounds[row.prompt] for row in rows)
    else:
        replayed = [tokens[row.prompt] for row in rows], [rounds[row.prompt] for row in rows]
        compared = sum(
            method != Method()
            and (t, method.drafter, PROBABILISTIC) in measured.replays
            and not _replays_exactly(measured, t)
            for t, _, method in measured.observations
        )
        agrees = same_length(emitted_and_rounds(rows), replayed, compared)
    return ReplayedLength(replay.mean_acceptance_length[k], agrees)


def _replays_exactly(measured: Measured, temperature: float) -> bool:
    """Say whether replay must count the decoder's rounds: at T=0, in a dtype that breaks no near-ties otherwise."""
    return temperature == 0 and measured.pair.target.dtype in (torch.float32, torch.float64)


def _memory(pair: Pair) -> Memory:
    def bytes_of(numbers: int | None, model: PreTrainedModel | None) -> int | None:
        return numbers * (model or pair.target).dtype.itemsize if numbers is not None else None

    return Memory(
        sum(p.numel() * p.element_size() for p in pair.target.parameters()),
        bytes_of(cached_numbers(pair.target), pair.target),
        {
            drafter.name: DrafterMemory(
                drafter.weights_bytes, bytes_of(drafter.family.cached_numbers(drafter), drafter.model)
            )
            for drafter in pair.drafters
        },
    )


def _by_category(measured: Measured, groups: Sequence[Group], plain: Sequence[Group]) -> dict[str, RunCategory]:
    decoded = {row.prompt for row in rows_of(groups)}
    categories = {}
    for name, places in measured.categories().items():
        chosen = decoded & set(places)
        if chosen:
            rows = [row for row in rows_of(groups) if row.prompt in chosen]
            # The speed-up is of batches that hold the category alone, for a batch has one clock.
            pure = [
                pair for pair in zip(groups, plain, strict=True) if all(row.prompt in chosen for row in pair[0].rows)
            ]
            times = speedup([group for group, _ in pure], [base for _, base in pure])
            categories[name] = RunCategory(len(rows), ratio(*emitted_and_rounds(rows)), times)
    return categories


def _repeated(groups: Sequence[Group]) -> float | None:
    return repeated_ngram_share(row.tokens for row in rows_of(groups))
