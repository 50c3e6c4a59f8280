"""The planner's predictions, costs times acceptance for every draft length and batch size, beside what was timed.

And the draft length for a server's load. Goodput is tokens of all texts a second. A draft length that pays for one text
at a time may cost goodput with many, for then the target's forward over more tokens takes longer: so servers take γ by
batch size, and draft nothing (γ = 0) where plain decoding is faster.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import fmean, median
from typing import Any

import numpy as np

from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.measurement.intervals import Estimate, ratio, ratios
from draftsmith.decode.measurement.replay import Replay
from draftsmith.decode.planner import RoundCosts, text_seconds
from draftsmith.scripts.measure.state import PROBABILISTIC, Group, Measured, member_name
from draftsmith.scripts.report.cost_types import ByLoad, Goodput, LoadRange, PlannerCheck, Prediction
from draftsmith.scripts.report.cost_types import Costs as CostsEntry
from draftsmith.scripts.report.types import Curve, CurveCategory, ProposerEntry, Run, Verifier
from draftsmith.train.kinds.draft_lengths import SCHEMA, chosen_lengths, entry, ranges
from draftsmith.train.kinds.drafter import Drafter

WORTH_SAYING = 1.02
"""A draft length that was not decoded is spoken of where it promises this many times the speed."""
SIZES = 24
"""Batch sizes at which draft lengths are compared, at most."""


def predicted_speedup(
    measured: Measured,
    temperature: float,
    drafter: Drafter,
    draft_length: int,
    groups: Sequence[Group],
    plain: Sequence[Group],
    with_prompt: bool = True,
) -> Estimate | None:
    """Return the speed-up that costs and acceptance predict for these batches and their ragged ends.

    Rounds are the replayed ones, or those that were decoded where replay does not apply. `with_prompt` includes the
    forwards over the prompts, as a measured speed-up does.
    """
    table, replay = measured.costs(temperature), measured.replays.get((temperature, drafter.name, PROBABILISTIC))
    if table is None:
        return None
    seconds, plain_seconds = [], []
    for group, base in zip(groups, plain, strict=True):
        prompt = max(measured.prompt_lengths[row.prompt] for row in group.rows) if with_prompt else 0
        if replay is None:
            rounds = [float(row.counts.num_drafts) for row in group.rows]
            spent = table.speculative_seconds(drafter.name, rounds, draft_length, drafter.nodes, prompt)
        else:
            spent = _replayed_seconds(table, drafter, replay, [row.prompt for row in group.rows], draft_length, prompt)
        seconds.append(spent)
        # Under sampling the texts differ in length too; τ is of the target's own.
        plain_seconds.append(table.plain_seconds([float(len(row.tokens)) for row in base.rows], prompt))
    return ratio(plain_seconds, seconds)


def _replayed_seconds(
    table: CostTable, drafter: Drafter, replay: Replay, places: Sequence[int], draft_length: int, prompt: int
) -> float:
    """Return how long the replayed rounds of texts that are decoded together take.

    Where drafters take turns, each round has the price of the one whose it is.
    """
    texts = [replay.texts[place] for place in places]
    if drafter.members:
        names, sizes = _members(drafter), [text.sizes[draft_length] for text in texts]
        return table.taking_turns_seconds(names, sizes, drafter.lengths(draft_length), prompt)
    nodes = nodes_of(drafter, replay, draft_length, len(texts))
    rounds = [text.counts[draft_length].num_drafts for text in texts]
    return table.speculative_seconds(drafter.name, rounds, draft_length, nodes, prompt)


def _members(drafter: Drafter) -> list[str]:
    return [member_name(drafter, source) for source in drafter.members]


def _with_prompts(
    measured: Measured, table: CostTable, drafter: Drafter, replay: Replay, lengths: Sequence[int], rows: int
) -> dict[int, Estimate]:
    """Return the speed-up by draft length of the replayed texts with their prompts, `rows` of them at a time."""
    count, prompts = len(replay.texts), measured.prompt_lengths
    batches = [range(first, first + rows) for first in range(0, count - rows + 1, rows)] or [range(count)]
    longest = [max(prompts[place] for place in batch) for batch in batches]
    emitted = replay.tokens_and_rounds(lengths[0])[0]
    plain = [
        table.plain_seconds([emitted[place] for place in batch], prompt)
        for batch, prompt in zip(batches, longest, strict=True)
    ]
    return ratios(
        {
            k: (
                plain,
                [
                    _replayed_seconds(table, drafter, replay, batch, k, prompt)
                    for batch, prompt in zip(batches, longest, strict=True)
                ],
            )
            for k in lengths
        }
    )


def nodes_of(drafter: Drafter, replay: Replay | None, draft_length: int, rows: int) -> float | None:
    """Return the tokens that a round verifies beside the last one, where they are not γ.

    Prompt lookup drafts as much as it finds, and rows that are verified together all take as much room as the one that
    found most: the expectation of that, E[max] = Σ_i 1 − P(fewer than i)^B.
    """
    if not drafter.family.drafts_less or replay is None:
        return drafter.nodes
    counts = [text.counts[draft_length] for text in replay.texts]
    drafts = sum(c.num_drafts for c in counts)
    drafted = [sum(position) for position in zip_longest(*(c.num_draft_tokens_per_pos for c in counts), fillvalue=0.0)]
    return sum(1 - (1 - min(1.0, count / drafts)) ** rows for count in drafted)


def curve_of(measured: Measured, temperature: float, name: str, verifier: Verifier, replay: Replay) -> Curve:
    """Return what replay says of a drafter at every draft length."""
    drafter = measured.drafter(name)
    # A tree has one draft length; one that is cut was never searched.
    lengths = list(drafter.draft_lengths) if drafter.has_one_length else replay.draft_lengths
    lengths = [k for k in lengths if drafter.proposer.longest is None or k <= drafter.proposer.longest]
    costs: dict[int, dict[int, tuple[RoundCosts, float | None]]] = {}
    predicted: dict[int, dict[int, Estimate]] = {}
    with_prompts: dict[int, dict[int, Estimate]] = {}
    table = measured.costs(temperature)
    if table is not None:
        for rows in dict.fromkeys(b for t, b in measured.settings if t == temperature):
            costs[rows] = {k: (table.at(name, rows), nodes_of(drafter, replay, k, rows)) for k in lengths}
            with_prompts[rows] = _with_prompts(measured, table, drafter, replay, lengths, rows)
            if drafter.members:
                predicted[rows] = _taking_turns(table, drafter, replay, lengths, rows)
                continue
            predicted[rows] = {
                k: replay.mean_acceptance_length[k].scaled(cost.speedup(1.0, k, nodes))
                for k, (cost, nodes) in costs[rows].items()
            }
    return Curve(
        proposer=ProposerEntry(**drafter.to_dict()),
        temperature=temperature,
        verifier=verifier,
        alpha=replay.alpha,
        mean_acceptance_length={k: replay.mean_acceptance_length[k] for k in lengths},
        acceptance_per_position=replay.acceptance_per_position[lengths[-1]],
        conditional_acceptance=replay.conditional_acceptance[lengths[-1]],
        by_category={
            category: _category(Replay([replay.texts[i] for i in places]), lengths)
            for category, places in measured.categories().items()
        },
        predicted_speedup=predicted,
        predicted_speedup_with_prompt=with_prompts,
        break_even_alpha={
            b: {k: cost.break_even_acceptance(k) if nodes is None else None for k, (cost, nodes) in by_length.items()}
            for b, by_length in costs.items()
        },
    )


def _taking_turns(
    table: CostTable, drafter: Drafter, replay: Replay, draft_lengths: Sequence[int], rows: int
) -> dict[int, Estimate]:
    """Return the speed-up by draft length where drafters take turns, of `rows` such texts at a time, prompts aside."""
    costs = [table.at(name, rows) for name in _members(drafter)]
    plain = costs[0].target[1] + costs[0].plain_overhead
    return ratios(
        {
            k: (
                [plain * tokens for tokens in replay.tokens_and_rounds(k)[0]],
                text_seconds(costs, [text.sizes[k] for text in replay.texts], drafter.lengths(k), rows),
            )
            for k in draft_lengths
        }
    )


def _category(replay: Replay, lengths: Sequence[int]) -> CurveCategory:
    return CurveCategory(len(replay.texts), replay.alpha, {k: replay.mean_acceptance_length[k] for k in lengths})


def advice(curves: Sequence[Curve], runs: Sequence[Run]) -> str | None:
    """Return what the planner says of draft lengths that were not decoded, where one is faster, prompts included."""
    decoded = {(run.proposer.name, run.draft_length) for run in runs}
    worst: dict[tuple[str, int], float] = {}
    for curve in curves:
        if curve.verifier == PROBABILISTIC:
            for by_length in curve.predicted_speedup_with_prompt.values():
                for k, estimate in by_length.items():
                    key = curve.proposer.name, k
                    worst[key] = min(worst.get(key, float("inf")), estimate.value or 0.0)
    best = max(worst, key=lambda key: worst[key], default=None)
    known = max((worst[key] for key in decoded if key in worst), default=0.0)
    if best is None or best in decoded or worst[best] <= max(known, 1.0) * WORTH_SAYING:
        return None
    return f"By prediction, {best[0]} with γ = {best[1]}, which was not decoded, is {worst[best]:.2f} times as fast."


def costs_entry(measured: Measured) -> CostsEntry | None:
    """Return what the report says of costs: those at the first temperature, and all tables as they were measured."""
    temperature, _ = measured.settings[0]
    table = measured.costs(temperature)
    if table is None:
        return None
    # A file's drafters may be more.
    drafters = [(drafter, table.drafters[drafter.name]) for drafter in measured.pair.drafters]
    return CostsEntry(
        context=table.context,
        target_seconds=table.target_seconds,
        draft_seconds={
            drafter.name: {
                b: {k: cost.start + k * cost.step for k in _lengths_of(drafter)} for b, cost in costs.items()
            }
            for drafter, costs in drafters
        },
        draft_seconds_per_token={
            drafter.name: {b: cost.step for b, cost in costs.items()} for drafter, costs in drafters
        },
        overhead_seconds={drafter.name: {b: cost.overhead for b, cost in costs.items()} for drafter, costs in drafters},
        plain_overhead_seconds=table.plain_overhead_seconds,
        prefill_seconds=table.prefill_seconds,
        tables=measured.tables,
    )


def _lengths_of(drafter: Drafter) -> list[int]:
    return list(drafter.draft_lengths) if drafter.has_one_length else sorted({1, *drafter.draft_lengths})


def planner_check(runs: Sequence[Run]) -> PlannerCheck | None:
    """Return how far predicted speed-ups are from measured ones; None where none was predicted."""
    points = [
        Prediction(
            run.proposer.name,
            run.draft_length,
            run.batch_size,
            run.temperature,
            predicted=run.predicted_speedup.value,
            measured=run.speedup.value,
        )
        for run in runs
        if run.predicted_speedup is not None
        and run.predicted_speedup.value is not None
        and run.speedup.value is not None
    ]
    if not points:
        return None
    return PlannerCheck(median(abs(point.predicted / point.measured - 1) for point in points), points)


def by_load(measured: Measured) -> list[ByLoad]:
    """Return for each drafter which draft length pays at which batch size; nothing where costs are unknown.

    Nor of what drafts trees, where servers draft chains.
    """
    found = []
    for drafter in measured.pair.drafters:
        if drafter.has_one_length or getattr(drafter.proposer, "tree", None) is not None:
            continue
        replays: dict[float, tuple[CostTable, Replay]] = {}
        for temperature in measured.config.temperature:
            table = measured.costs(temperature)
            replay = measured.replays.get((temperature, drafter.name, PROBABILISTIC))
            if table is not None and replay is not None:
                replays[temperature] = table, replay
        if len(replays) == len(measured.config.temperature) and (load := _of_drafter(drafter, replays)) is not None:
            found.append(load)
    return found


def _of_drafter(drafter: Drafter, replays: Mapping[float, tuple[CostTable, Replay]]) -> ByLoad | None:
    """Return its draft lengths; None of a block drafter whose whole blocks were not replayed."""
    (table, replay), *_ = replays.values()
    longest, whole = drafter.proposer.longest, drafter.family.whole_blocks
    lengths = [k for k in replay.draft_lengths if longest is None or k == longest or (k < longest and not whole)]
    if not lengths:
        return None
    most, goodput = max(table.target_seconds), dict[int, dict[int, float]]()
    for rows in sizes_up_to(most):
        # Seconds for a token of each law; a server that serves them alike has their mean.
        plain = {t: its.at(drafter.name, rows) for t, (its, _) in replays.items()}
        seconds = {0: fmean(costs.target[1] + costs.plain_overhead for costs in plain.values())}
        for k in lengths:
            seconds[k] = fmean(_token_seconds(drafter, its, of, k, rows) for its, of in replays.values())
        goodput[rows] = {k: rows / each for k, each in seconds.items()}
    chosen = chosen_lengths(goodput)
    return ByLoad(
        proposer=drafter.name,
        temperatures=list(replays),
        ranges=[LoadRange(*each) for each in ranges(chosen, most)],
        goodput={
            rows: Goodput(plain=of[0], drafting=of[chosen[rows] or max(lengths, key=lambda k: of[k])])
            for rows, of in goodput.items()
        },
    )


def _token_seconds(drafter: Drafter, table: CostTable, replay: Replay, draft_length: int, rows: int) -> float:
    """Return the seconds for a token of a text, its prompt left aside, where `rows` are decoded together."""
    tokens, rounds = (sum(each) for each in replay.tokens_and_rounds(draft_length))
    if drafter.members:
        costs = [table.at(name, rows) for name in _members(drafter)]
        sizes = [text.sizes[draft_length] for text in replay.texts]
        return sum(text_seconds(costs, sizes, drafter.lengths(draft_length), rows)) / tokens
    nodes = nodes_of(drafter, replay, draft_length, rows)
    return table.at(drafter.name, rows).round_seconds(draft_length, nodes) * rounds / tokens


def sizes_up_to(most: int) -> list[int]:
    """Return batch sizes from 1 to `most`, ever further apart."""
    return sorted({round(size) for size in np.geomspace(1, most, SIZES)}) if most > SIZES else list(range(1, most + 1))


def draft_lengths(measured: Measured, loads: Sequence[ByLoad]) -> dict[str, Any]:
    """Return what draft_lengths.json holds: by drafter the fields of vLLM's speculative config."""
    paths = {drafter.name: drafter.path for drafter in measured.pair.drafters}
    entries = {
        load.proposer: entry(
            paths[load.proposer],
            load.temperatures,
            [(each.first, each.last, each.draft_length) for each in load.ranges],
        )
        for load in loads
    }
    return {"schema": SCHEMA, "target": measured.config.target, "drafters": entries}
