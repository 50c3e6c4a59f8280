"""The draft length for a server's load: from measured costs and replay, what pays with so many texts at a time.

Goodput is tokens of all texts a second. A draft length that pays for one text at a time may cost goodput with many, for
then the target's forward over more tokens takes longer: so servers take γ by batch size, and draft nothing (γ = 0)
where plain decoding is faster.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.measurement.replay import Replay
from draftsmith.decode.planner import text_seconds
from draftsmith.scripts.measure.predictions import nodes_of
from draftsmith.scripts.measure.state import PROBABILISTIC, Measured, member_name
from draftsmith.scripts.report.types import ByLoad, Goodput, LoadRange
from draftsmith.train.kinds.draft_lengths import BY_BATCH_SIZE, NUM, SCHEMA
from draftsmith.train.kinds.drafter import Drafter

SIZES = 24
"""Batch sizes at which draft lengths are compared, at most."""
ALIKE = 0.99
"""Of the best goodput, from which a smaller batch's draft length is kept: a change that wins nothing is noise."""


def by_load(measured: Measured) -> list[ByLoad]:
    """Return for each drafter which draft length pays at which batch size; nothing where costs are unknown."""
    found = []
    for drafter in measured.pair.drafters:
        replays: dict[float, tuple[CostTable, Replay]] = {}
        for temperature in measured.config.temperature:
            table = measured.costs(temperature)
            replay = measured.replays.get((temperature, drafter.name, PROBABILISTIC))
            if table is not None and replay is not None:
                replays[temperature] = table, replay
        if len(replays) == len(measured.config.temperature):
            found.append(_of_drafter(drafter, replays))
    return found


def _of_drafter(drafter: Drafter, replays: Mapping[float, tuple[CostTable, Replay]]) -> ByLoad:
    (table, replay), *_ = replays.values()
    lengths = list(drafter.draft_lengths) if drafter.has_one_length else replay.draft_lengths
    longest = drafter.proposer.longest
    lengths = [
        k for k in lengths if longest is None or k == longest or (k < longest and not drafter.family.whole_blocks)
    ]
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
        ranges=ranges(chosen, most),
        goodput={rows: Goodput(plain=of[0], drafting=of[chosen[rows]]) for rows, of in goodput.items()},
    )


def _token_seconds(drafter: Drafter, table: CostTable, replay: Replay, draft_length: int, rows: int) -> float:
    """Return the seconds for a token of a text, its prompt left aside, where `rows` are decoded together."""
    tokens, rounds = (sum(each) for each in replay.tokens_and_rounds(draft_length))
    if drafter.members:
        costs = [table.at(member_name(drafter, source), rows) for source in drafter.members]
        sizes = [text.sizes[draft_length] for text in replay.texts]
        return sum(text_seconds(costs, sizes, drafter.lengths(draft_length), rows)) / tokens
    nodes = nodes_of(drafter, replay, draft_length, rows)
    return table.at(drafter.name, rows).round_seconds(draft_length, nodes) * rounds / tokens


def sizes_up_to(most: int) -> list[int]:
    """Return batch sizes from 1 to `most`, ever further apart."""
    return sorted({round(size) for size in np.geomspace(1, most, SIZES)}) if most > SIZES else list(range(1, most + 1))


def chosen_lengths(goodput: Mapping[int, Mapping[int, float]]) -> dict[int, int]:
    """Return by batch size the draft length of the greatest goodput; that of the size before where it is as good.

    Args:
        goodput: by batch size, then draft length; 0 is plain decoding.
    """
    chosen, before = dict[int, int](), None
    for rows, of in sorted(goodput.items()):
        best = max(of, key=lambda k: of[k])
        if before is None or of[before] < ALIKE * of[best]:
            before = best
        chosen[rows] = before
    return chosen


def ranges(chosen: Mapping[int, int], most: int) -> list[LoadRange]:
    """Return draft lengths by ranges of batch sizes, without gaps, from 1 to `most`."""
    found: list[LoadRange] = []
    sizes = sorted(chosen)
    for rows, following in zip(sizes, [*sizes[1:], most + 1], strict=True):
        if found and found[-1].draft_length == chosen[rows]:
            found[-1] = LoadRange(found[-1].first, following - 1, chosen[rows])
        else:
            found.append(LoadRange(rows, following - 1, chosen[rows]))
    return found


def draft_lengths(measured: Measured, loads: Sequence[ByLoad]) -> dict[str, Any]:
    """Return what draft_lengths.json holds: by drafter the fields of vLLM's speculative config."""
    paths = {drafter.name: drafter.path for drafter in measured.pair.drafters}
    return {
        "schema": SCHEMA,
        "target": measured.config.target,
        "drafters": {
            load.proposer: {
                "path": paths[load.proposer],
                "temperatures": load.temperatures,
                NUM: max(each.draft_length for each in load.ranges),
                BY_BATCH_SIZE: [[each.first, each.last, each.draft_length] for each in load.ranges],
            }
            for load in loads
        },
    }
