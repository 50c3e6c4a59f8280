"""The planner's predictions, costs times acceptance for every draft length and batch size, beside what was timed."""

from collections.abc import Sequence
from itertools import zip_longest
from statistics import median

from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.measurement.intervals import Estimate, ratio, ratios
from draftsmith.decode.measurement.replay import Replay
from draftsmith.decode.planner import RoundCosts, text_seconds
from draftsmith.scripts.measure.state import PROBABILISTIC, Group, Measured, member_name
from draftsmith.scripts.report.cost_types import Costs as CostsEntry
from draftsmith.scripts.report.cost_types import PlannerCheck, Prediction
from draftsmith.scripts.report.types import Curve, CurveCategory, ProposerEntry, Run, Verifier
from draftsmith.train.kinds.drafter import Drafter

WORTH_SAYING = 1.02
"""A draft length that was not decoded is spoken of where it promises this many times the speed."""


def predicted_speedup(
    measured: Measured,
    temperature: float,
    drafter: Drafter,
    draft_length: int,
    groups: Sequence[Group],
    plain: Sequence[Group],
) -> Estimate | None:
    """Return the speed-up that costs and acceptance predict for these batches, prompts and ragged ends included.

    Rounds are the replayed ones, or those that were decoded where replay does not apply. Where drafters take turns,
    each round has the price of the one whose it is.
    """
    table, replay = measured.costs(temperature), measured.replays.get((temperature, drafter.name, PROBABILISTIC))
    if table is None:
        return None
    members = [member_name(drafter, source) for source in drafter.members]
    seconds, plain_seconds = [], []
    for group, base in zip(groups, plain, strict=True):
        if replay is not None and members:
            sizes = [replay.texts[row.prompt].sizes[draft_length] for row in group.rows]
            seconds.append(table.taking_turns_seconds(members, sizes, drafter.lengths(draft_length)))
        else:
            if replay is None:
                rounds = [float(row.counts.num_drafts) for row in group.rows]
            else:
                rounds = [replay.texts[row.prompt].counts[draft_length].num_drafts for row in group.rows]
            nodes = nodes_of(drafter, replay, draft_length, len(rounds))
            seconds.append(table.speculative_seconds(drafter.name, rounds, draft_length, nodes))
        # Under sampling the texts differ in length too; τ is of the target's own.
        tokens = [float(len(row.tokens)) for row in base.rows]
        plain_seconds.append(table.plain_seconds(tokens))
    return ratio(plain_seconds, seconds)


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
    table = measured.costs(temperature)
    if table is not None:
        for rows in dict.fromkeys(b for t, b in measured.settings if t == temperature):
            costs[rows] = {k: (table.at(name, rows), nodes_of(drafter, replay, k, rows)) for k in lengths}
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
        break_even_alpha={
            b: {k: cost.break_even_acceptance(k) if nodes is None else None for k, (cost, nodes) in by_length.items()}
            for b, by_length in costs.items()
        },
    )


def _taking_turns(
    table: CostTable, drafter: Drafter, replay: Replay, draft_lengths: Sequence[int], rows: int
) -> dict[int, Estimate]:
    """Return the speed-up by draft length where drafters take turns, of `rows` such texts at a time, prompts aside."""
    costs = [table.at(member_name(drafter, source), rows) for source in drafter.members]
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
    """Return what the planner says of draft lengths that were not decoded, where one of them is faster."""
    decoded = {(run.proposer.name, run.draft_length) for run in runs}
    worst: dict[tuple[str, int], float] = {}
    for curve in curves:
        if curve.verifier == PROBABILISTIC:
            for by_length in curve.predicted_speedup.values():
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
