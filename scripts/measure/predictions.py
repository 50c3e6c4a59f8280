"""The planner's predictions, costs times acceptance at every γ and batch size, and γ by a server's load.

Goodput is tokens of all texts a second. A γ that pays for one text at a time may cost goodput with many, because the
target's forward over more tokens takes longer: so servers take γ by batch size, and draft nothing (γ = 0) where plain
decoding is faster.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.measurement.intervals import Estimate, ratio, ratios
from draftsmith.decode.measurement.replay import Replay
from draftsmith.decode.planning.costs import text_seconds
from draftsmith.scripts.engines.draft_lengths import SCHEMA, chosen_lengths, entry, ranges
from draftsmith.scripts.measure.replays import groups_of
from draftsmith.scripts.measure.state import PROBABILISTIC, Measured, member_name
from draftsmith.scripts.report.entries import ByLoad, CurveGroup, Goodput, LoadRange
from draftsmith.scripts.report.entries import Costs as CostsEntry
from draftsmith.scripts.report.types import Curve, ProposerEntry, Verifier
from draftsmith.train.kinds.drafter import Drafter

SIZES = 24


def predicted_speedup(
    measured: Measured, temperature: float, drafter: Drafter, draft_length: int, rows: int
) -> Estimate | None:
    """Return the speed-up of all replayed texts, `rows` at a time, prompts included; None without costs or replay."""
    table, replay = measured.costs(temperature), measured.replays.get((temperature, drafter.name, PROBABILISTIC))
    if table is None or replay is None:
        return None
    return ratio(*priced(measured, table, drafter, replay, [draft_length], rows)[draft_length])


def priced(
    measured: Measured, table: CostTable, drafter: Drafter, replay: Replay, lengths: Sequence[int], rows: int,
    with_prompts: bool = True,
) -> dict[int, tuple[list[float], list[float]]]:  # fmt: skip
    """Return the seconds of plain decoding and of drafting by γ, of each `rows` replayed texts, prompts included."""
    count, prompts = len(replay.texts), [length * with_prompts for length in measured.prompt_lengths]
    batches = [range(first, first + rows) for first in range(0, count - rows + 1, rows)] or [range(count)]
    longest = [(batch, max(prompts[index] for index in batch)) for batch in batches]
    emitted = replay.tokens_and_rounds(lengths[0])[0]
    plain = [table.plain_seconds([emitted[index] for index in batch], prompt) for batch, prompt in longest]
    drafting = {
        k: [_replayed_seconds(table, drafter, replay, batch, k, prompt) for batch, prompt in longest] for k in lengths
    }
    return {k: (plain, seconds) for k, seconds in drafting.items()}


def _replayed_seconds(
    table: CostTable, drafter: Drafter, replay: Replay, indices: Sequence[int], draft_length: int, prompt: int
) -> float:
    """Return the seconds that the replayed rounds of texts decoded together take."""
    texts = [replay.texts[index] for index in indices]
    if names := _priced_by_size(drafter):
        sizes = [text.sizes[draft_length] for text in texts]
        return table.taking_turns_seconds(names, sizes, drafter.lengths(draft_length), prompt)
    rounds = [text.counts[draft_length].num_drafts for text in texts]
    return table.speculative_seconds(drafter.name, rounds, draft_length, drafter.nodes, prompt)


def _priced_by_size(drafter: Drafter) -> list[str]:
    """Return the names in a cost table of drafters whose rounds each cost what is drafted, by whom; [] if all cost one.

    Copies are as long as the text allows. Forwards are not linear in their tokens, so a mean length has no price.
    """
    if drafter.members:
        return [member_name(drafter, source) for source in drafter.members]
    return [drafter.name] if drafter.family.drafts_less else []


def curve_of(measured: Measured, temperature: float, name: str, verifier: Verifier, replay: Replay) -> Curve:
    """Return the replay's figures of a drafter at every draft length."""
    drafter, table = measured.drafter(name), measured.costs(temperature)
    # A tree has one draft length: no tree was searched for others.
    lengths = list(drafter.draft_lengths) if drafter.has_one_length else replay.draft_lengths
    lengths = [k for k in lengths if drafter.proposer.longest is None or k <= drafter.proposer.longest]
    sizes = [] if table is None else [b for t, b in measured.settings if t == temperature]
    groups = {
        grouping: {group: _of_group(part, lengths) for group, part in replays.items()}
        for grouping, replays in groups_of(measured, replay).items()
    }
    return Curve(
        proposer=ProposerEntry(**drafter.to_dict()),
        temperature=temperature,
        verifier=verifier,
        alpha=replay.alpha,
        mean_acceptance_length={k: replay.mean_acceptance_length[k] for k in lengths},
        acceptance_per_position=replay.acceptance_per_position[lengths[-1]],
        conditional_acceptance=replay.conditional_acceptance[lengths[-1]],
        by_category=groups["category"],
        predicted_speedup={b: ratios(priced(measured, table, drafter, replay, lengths, b)) for b in sizes if table},
        by_context=groups["context"],
    )


def _of_group(replay: Replay, lengths: Sequence[int]) -> CurveGroup:
    """Return the figures of one group's replay."""
    tokens = round(sum(replay.tokens_and_rounds(lengths[0])[0]))
    lengths_of = {k: replay.mean_acceptance_length[k] for k in lengths}
    return CurveGroup(len(replay.texts), replay.alpha, lengths_of, tokens)


def costs_entry(measured: Measured) -> CostsEntry | None:
    """Return the report's costs: those at the first temperature, and all tables as measured."""
    table = measured.costs(measured.config.temperature[0])
    if table is None:
        return None
    # A cost file may have more drafters.
    drafters = {drafter.name: table.drafters[drafter.name] for drafter in measured.pair.drafters}
    return CostsEntry(
        context=table.context,
        target_seconds=table.target_seconds,
        draft_seconds_per_token={d: {b: cost.step for b, cost in costs.items()} for d, costs in drafters.items()},
        overhead_seconds={d: {b: cost.overhead for b, cost in costs.items()} for d, costs in drafters.items()},
        tables=measured.tables,
    )


def by_load(measured: Measured) -> list[ByLoad]:
    """Return the γ that pays at each batch size, for each drafter of chains whose costs and replays are known."""
    loads = []
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
            loads.append(load)
    return loads


def _of_drafter(drafter: Drafter, replays: Mapping[float, tuple[CostTable, Replay]]) -> ByLoad | None:
    """Return a drafter's γ by load; None for a block drafter whose whole blocks were not replayed."""
    (table, replay), *_ = replays.values()
    longest, whole_blocks = drafter.proposer.longest, drafter.family.whole_blocks
    lengths = [k for k in replay.draft_lengths if longest is None or k == longest or (k < longest and not whole_blocks)]
    if not lengths:
        return None
    most, goodput = max(table.target_seconds), dict[int, dict[int, float]]()
    for rows in sizes_up_to(most):
        # Seconds per token, a mean over the temperatures: a server is taken to serve them equally often.
        plain = [costs.at(drafter.name, rows) for costs, _ in replays.values()]
        seconds = {0: fmean(costs.target[1] + costs.plain_overhead for costs in plain)}
        for k in lengths:
            seconds[k] = fmean(_token_seconds(drafter, *pair, k, rows) for pair in replays.values())
        goodput[rows] = {k: rows / token_seconds for k, token_seconds in seconds.items()}
    chosen, goodputs = chosen_lengths(goodput), {}
    for rows, by_length in goodput.items():
        drafting = by_length[chosen[rows]] if chosen[rows] else max(by_length[k] for k in lengths)
        goodputs[rows] = Goodput(plain=by_length[0], drafting=drafting)
    load_ranges = [LoadRange(*load_range) for load_range in ranges(chosen, most)]
    return ByLoad(drafter.name, list(replays), load_ranges, goodputs)


def _token_seconds(drafter: Drafter, table: CostTable, replay: Replay, draft_length: int, rows: int) -> float:
    """Return the seconds per token of a text without its prompt, `rows` texts at a time."""
    tokens, rounds = (sum(column) for column in replay.tokens_and_rounds(draft_length))
    if names := _priced_by_size(drafter):
        costs = [table.at(name, rows) for name in names]
        sizes = [text.sizes[draft_length] for text in replay.texts]
        return sum(text_seconds(costs, sizes, drafter.lengths(draft_length), rows)) / tokens
    return table.at(drafter.name, rows).round_seconds(draft_length, drafter.nodes) * rounds / tokens


def sizes_up_to(most: int) -> list[int]:
    """Return batch sizes from 1 to `most`, ever further apart."""
    return sorted({round(size) for size in np.geomspace(1, most, SIZES)}) if most > SIZES else list(range(1, most + 1))


def draft_lengths(measured: Measured, loads: Sequence[ByLoad]) -> dict[str, Any]:
    """Return the content of draft_lengths.json: by drafter the fields of vLLM's speculative config."""
    paths, entries = {drafter.name: drafter.path for drafter in measured.pair.drafters}, {}
    for load in loads:
        rows = [(load_range.first, load_range.last, load_range.draft_length) for load_range in load.ranges]
        entries[load.proposer] = entry(paths[load.proposer], load.temperatures, rows)
    return {"schema": SCHEMA, "target": measured.config.target, "drafters": entries}
