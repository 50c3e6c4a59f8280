"""The choice of a draft length: measured costs times measured acceptance.

γ drafted tokens a round emit τ(γ) tokens for d(γ) + t(γ + 1) + o seconds, where t(k) is a forward of the target over k
tokens, d(γ) the drafting and o the rest; plain decoding emits one for t(1). The formula of Leviathan et al. 2023
(theorem 3.8) is the case t(k) = t(1), which no machine grants.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache import CachedModel
from draftsmith.decode.clock import median_seconds, now
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import Proposal, Proposer


@dataclass(frozen=True)
class RoundCosts:
    """The costs of a round on one machine, in seconds."""

    target: Mapping[int, float]
    """t(k): a forward of the target over k tokens a row; k that were not measured are interpolated."""
    draft_step: float
    """Drafting one token more: d(γ) = `draft_start` + γ · `draft_step`."""
    overhead: float = 0.0
    """o: the rest of a round."""
    draft_start: float = 0.0
    """What a draft costs however long it is."""
    plain_overhead: float = 0.0
    """What plain decoding does for a token beside its forward."""

    def __post_init__(self) -> None:
        if 1 not in self.target:
            raise InputError(
                f"costs: expected the target's seconds for 1 token among them, found {sorted(self.target)}"
            )

    def verification(self, tokens: float) -> float:
        """Return t(k), interpolated between measured k and extrapolated beyond the last two."""
        return interpolated(self.target, tokens)

    def drafting(self, draft_length: int) -> float:
        """Return d(γ)."""
        return self.draft_start + draft_length * self.draft_step

    def round_seconds(self, draft_length: int, nodes: float | None = None) -> float:
        """Return d(γ) + t(γ + 1) + o; trees verify their `nodes` in place of γ tokens, n-grams what they find."""
        block = 1 + (draft_length if nodes is None else nodes)
        seconds = self.drafting(draft_length) + self.verification(block) + self.overhead
        return max(seconds, self.target[1])  # an overhead that noise left below zero does not undo a forward

    def speedup(self, acceptance_length: float, draft_length: int, nodes: float | None = None) -> float:
        """Return τ·t(1) ÷ (d(γ) + t(γ + 1) + o), the speed-up over plain decoding; 1 for γ = 0.

        t(1) is what plain decoding takes for a token, its own loop included.
        """
        if draft_length == 0:
            return 1.0
        return acceptance_length * (self.target[1] + self.plain_overhead) / self.round_seconds(draft_length, nodes)

    def break_even_length(self, draft_length: int, nodes: float | None = None) -> float:
        """Return the τ at which this γ is as fast as plain decoding."""
        return 1.0 / self.speedup(1.0, draft_length, nodes)

    def break_even_acceptance(self, draft_length: int) -> float | None:
        """Return the α of every position from which a chain of γ pays; None where not even α = 1 does."""
        wanted = self.break_even_length(draft_length)
        if wanted >= draft_length + 1:
            return None
        low, high = 0.0, 1.0
        for _ in range(50):  # τ grows with α
            middle = (low + high) / 2
            low, high = (low, middle) if acceptance_length([middle] * draft_length) >= wanted else (middle, high)
        return high


def interpolated(values: Mapping[int, float], x: float) -> float:
    """Return the value at x: between the neighbours that were measured, level before the first, and a line beyond."""
    measured = sorted(values)
    if len(measured) == 1 or x <= measured[0]:
        return values[measured[0]]
    above = next((k for k in measured if k >= x), measured[-1])
    below = measured[measured.index(above) - 1]
    return values[below] + (values[above] - values[below]) / (above - below) * (x - below)


def turn_seconds(costs: Sequence[RoundCosts], draft_lengths: Sequence[int], most: int) -> np.ndarray:
    """Return the seconds of a round by the drafter that drafts it and the number of drafted tokens, (S, `most` + 1).

    Whoever comes later is asked once the others have looked in vain, which takes d(0), as where nothing is drafted.

    Args:
        costs: of each of S drafters that take turns, in their order.
        draft_lengths: γ of each.
        most: drafted tokens of the largest draft.
    """
    seconds, looked = np.zeros((len(costs), most + 1)), 0.0
    for place, (cost, draft_length) in enumerate(zip(costs, draft_lengths, strict=True)):
        for nodes in range(most + 1):
            drafting = looked + cost.drafting(draft_length if nodes else 0)
            # As in `RoundCosts.round_seconds`, a round is no faster than a forward.
            seconds[place, nodes] = max(drafting + cost.verification(1 + nodes) + cost.overhead, cost.target[1])
        looked += cost.drafting(0)
    return seconds


def text_seconds(
    costs: Sequence[RoundCosts], sizes: Sequence[np.ndarray], draft_lengths: Sequence[int], rows: int = 1
) -> list[float]:
    """Return the seconds of each text's rounds where drafters take turns, its prompt left aside.

    Args:
        costs: of each of S drafters, in their order, for `rows` rows.
        sizes: of each text its rounds by drafter and number of drafted tokens, (≤ S, ≤ K + 1): `BatchReplay.sizes`.
        draft_lengths: γ of each drafter.
        rows: B, such texts that are decoded together.
    """
    sizes_NSK = stacked_sizes(sizes, len(costs))
    prices_SK, all_SK = turn_seconds(costs, draft_lengths, sizes_NSK.shape[2] - 1), sizes_NSK.sum(0)
    return [float((prices_SK * beside_others(sizes_SK, all_SK, rows)).sum()) for sizes_SK in sizes_NSK]


def stacked_sizes(sizes: Sequence[np.ndarray], drafters: int) -> np.ndarray:
    """Return several texts' rounds by drafter and number of drafted tokens in one array, (N, S, K + 1)."""
    most = max(each.shape[1] for each in sizes)
    return np.stack([np.pad(each, ((0, drafters - len(each)), (0, most - each.shape[1]))) for each in sizes])


def beside_others(sizes_SK: np.ndarray, others_SK: np.ndarray, rows: int) -> np.ndarray:
    """Return a row's rounds by the latest drafter and the largest draft of all rows that are decoded with it.

    These set what a round takes. The other rows' rounds are as if drawn from `others`, each for itself.

    Args:
        sizes_SK: the row's rounds by drafter and number of drafted tokens.
        others_SK: the rounds of all.
        rows: B, the row itself included.
    """
    if rows == 1:
        return sizes_SK
    # P(no other row is beyond s or k) · the row's own rounds that are not, and its increments.
    within = others_SK.cumsum(0).cumsum(1) / others_SK.sum()
    together = sizes_SK.cumsum(0).cumsum(1) * within ** (rows - 1)
    return np.diff(np.diff(together, axis=0, prepend=0.0), axis=1, prepend=0.0)


def acceptance_length(conditional: Sequence[float]) -> float:
    """Return τ = 1 + Σ_j Π_{i ≤ j} a_i of a chain whose positions are accepted with these conditional probabilities."""
    length, reach = 1.0, 1.0
    for a in conditional:
        reach *= a
        length += reach
    return length


def best_draft_length(
    costs: RoundCosts, acceptance: float, longest: int, nodes: Callable[[int], int] | None = None
) -> int:
    """Return the γ ≤ `longest` of the greatest speed-up where every position is accepted alike; 0: do not draft.

    `nodes` says how many tokens a draft of some depth has that are verified; as many as it is deep if None.
    """
    speedups = [
        costs.speedup(acceptance_length([acceptance] * k), k, None if nodes is None else nodes(k))
        for k in range(longest + 1)
    ]
    return max(range(longest + 1), key=lambda k: speedups[k])


@torch.inference_mode()
def verification_costs(
    target: PreTrainedModel, rows: int, context: int, tokens: Sequence[int], repeats: int = 5, compiled: bool = False
) -> dict[int, float]:
    """Measure t(k) for blocks of k tokens behind a context, `rows` at a time: medians, the sizes taken in turns."""
    model = CachedModel(target, rows, context, block=max(tokens), compiled=compiled)
    model.prefill(torch.ones(rows, context, dtype=torch.long, device=target.device))
    blocks = {k: torch.ones(rows, k, dtype=torch.long, device=target.device) for k in tokens}
    calls = {k: partial(model.feed, block, [context] * rows) for k, block in blocks.items()}
    return median_seconds(calls, repeats, target.device)


@dataclass
class Plan:
    """Chooses γ anew each round, from the acceptance so far and the costs; 0 where drafting does not pay.

    The rate at which drafted tokens are accepted is estimated over the recent rounds of all rows. Where it does not pay
    to draft, every 16th round drafts one token, to notice when it would.

    Args:
        costs: measured costs. None measures them: the target's before the first round, the drafter's as it drafts.
            Under sampling the texts then depend on the clock: their distribution is right, but a seed does not repeat
            them.
        longest: the greatest γ.
    """

    costs: RoundCosts | None = None
    longest: int = 8
    decay: float = 0.96
    _accepted: float = field(default=3.0, init=False)
    _rejected: float = field(default=1.0, init=False)
    _idle: int = field(default=0, init=False)
    _drafting: list[float] = field(default_factory=list, init=False)
    _target: dict[int, float] | None = field(default=None, init=False)
    _proposer: Proposer | None = field(default=None, init=False)

    def start(self, target: PreTrainedModel, proposer: Proposer, rows: int, context: int, compiled: bool) -> None:
        """Begin with new rows: measure the target where no costs were given and it was not measured for such drafts."""
        self._proposer = proposer
        largest = 1 + proposer.nodes(self.longest)
        if self.costs is None and (self._target is None or max(self._target) < largest):
            sizes = sorted({1, 2, (largest + 2) // 2, largest})
            self._target = verification_costs(target, rows, context, sizes, compiled=compiled)

    def draft_length(self) -> int:
        """Return γ for the next round."""
        costs, longest, nodes, at_once = self.costs, self.longest, None, False
        if self._proposer is not None:
            nodes, at_once = self._proposer.nodes, self._proposer.at_once
            longest = longest if self._proposer.longest is None else min(longest, self._proposer.longest)
        if costs is None:
            if not self._drafting:
                return min(4, longest)
            recent = sorted(self._drafting[-15:])
            drafting = recent[len(recent) // 2]
            costs = RoundCosts(
                self._target or {}, 0.0 if at_once else drafting, draft_start=drafting if at_once else 0.0
            )
        best = best_draft_length(costs, self._accepted / (self._accepted + self._rejected), longest, nodes)
        self._idle = 0 if best else self._idle + 1
        return 1 if self._idle and self._idle % 16 == 0 else best

    def propose(
        self, target: PreTrainedModel, proposer: Proposer, contexts: Sequence[Tensor], room: Sequence[int]
    ) -> list[Proposal]:
        """Let the proposer draft for rows that have room for `room` drafted tokens each.

        Where no costs are given it notes how long that took, for which it waits for the device.
        """
        gamma = self.draft_length()
        lengths = [min(gamma, left) for left in room]
        if self.costs is not None:
            return proposer.propose(contexts, lengths)
        begin = now(target.device)
        drafts = proposer.propose(contexts, lengths)
        seconds, depth = now(target.device) - begin, max(draft.tree.depth for draft in drafts)
        if depth:
            self._drafting.append(seconds if proposer.at_once else seconds / depth)
        return drafts

    def observe(self, accepted: int, drafted: int) -> None:
        """Learn from the result of one row's draft."""
        if drafted:
            self._accepted = self._accepted * self.decay + accepted
            self._rejected = self._rejected * self.decay + (accepted < drafted)


@dataclass(frozen=True)
class FixedLength:
    """A given γ in place of a `Plan`, for every round."""

    longest: int

    def start(self, target: PreTrainedModel, proposer: Proposer, rows: int, context: int, compiled: bool) -> None:
        """Measure nothing."""

    def propose(
        self, target: PreTrainedModel, proposer: Proposer, contexts: Sequence[Tensor], room: Sequence[int]
    ) -> list[Proposal]:
        """Let the proposer draft for rows that have room for `room` drafted tokens each."""
        return proposer.propose(contexts, [min(self.longest, left) for left in room])

    def observe(self, accepted: int, drafted: int) -> None:
        """Learn nothing."""


def as_plan(draft_length: "int | Plan | None", longest: int | None = None) -> Plan | FixedLength:
    """Return the plan itself, a new one for None, or one of a fixed draft length.

    Raises:
        InputError: a draft length below 1, or above the proposer's longest.
    """
    if not isinstance(draft_length, int):
        return Plan() if draft_length is None else draft_length
    if draft_length < 1:
        raise InputError(f"draft_length: expected at least 1, found {draft_length}")
    if longest is not None and draft_length > longest:
        raise InputError(
            f"draft_length: expected at most the {longest} tokens that the draft was trained to propose, found "
            f"{draft_length}"
        )
    return FixedLength(draft_length)
