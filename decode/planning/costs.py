"""The seconds of a round, and the speed-up that they and the acceptance make.

A round that drafts γ tokens emits τ(γ) tokens in d(γ) + t(γ + 1) + o seconds: t(k) is a forward of the target over k
tokens, d(γ) the drafting and o the rest. Plain decoding emits one token in t(1). The formula of Leviathan et al. 2023
(theorem 3.8) is the case t(k) = t(1), which no real machine has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from draftsmith.decode.cache import CachedModel
from draftsmith.decode.clock import least_seconds
from draftsmith.decode.errors import InputError


@dataclass(frozen=True)
class RoundCosts:
    """The costs of a round on one machine, in seconds; `overhead` is o, the rest of a round."""

    target: Mapping[int, float]  # t(k), a forward of the target over k tokens a row; other k are interpolated
    draft_step: float  # one more drafted token: d(γ) = `draft_start` + γ · `draft_step`
    overhead: float = 0.0
    draft_start: float = 0.0  # a draft of any length
    plain_overhead: float = 0.0  # plain decoding's work per token outside its forward

    def __post_init__(self) -> None:
        if 1 not in self.target:
            raise InputError(
                f"costs: expected the target's seconds for 1 token among them, found {sorted(self.target)}"
            )

    def verification(self, tokens: float) -> float:
        """Return t(k), interpolated between measured k and extrapolated beyond the last two."""
        return interpolate(self.target, tokens)

    def drafting(self, draft_length: int) -> float:
        """Return d(γ)."""
        return self.draft_start + draft_length * self.draft_step

    def round_seconds(self, draft_length: int, nodes: int | None = None) -> float:
        """Return d(γ) + t(γ + 1) + o; `nodes` replaces γ as the number of verified tokens of trees."""
        block = 1 + (draft_length if nodes is None else nodes)
        seconds = self.drafting(draft_length) + self.verification(block) + self.overhead
        return max(seconds, self.target[1])  # a round is no faster than a forward, even if noise makes o negative

    def speedup(self, acceptance_length: float, draft_length: int, nodes: int | None = None) -> float:
        """Return τ·t(1) ÷ (d(γ) + t(γ + 1) + o), the speed-up over plain decoding with its overhead; 1 for γ = 0."""
        if draft_length == 0:
            return 1.0
        return acceptance_length * (self.target[1] + self.plain_overhead) / self.round_seconds(draft_length, nodes)


def interpolate(values: Mapping[int, float], x: float) -> float:
    """Return the value at x: linear between measured neighbours and beyond the last two, constant before the first."""
    if x in values:
        return values[int(x)]
    measured = sorted(values)
    if len(measured) == 1 or x <= measured[0]:
        return values[measured[0]]
    above = next((k for k in measured if k >= x), measured[-1])
    below = measured[measured.index(above) - 1]
    return values[below] + (values[above] - values[below]) / (above - below) * (x - below)


def turn_seconds(costs: Sequence[RoundCosts], draft_lengths: Sequence[int], most: int) -> np.ndarray:
    """Return the seconds of a round by its drafter and number of drafted tokens, (S, `most` + 1).

    S drafters take turns in this order, each with its γ; a round that drafts nothing costs d(0).
    """
    # A later drafter is asked after the earlier ones found nothing, which costs each of them d(0).
    seconds, searching = np.zeros((len(costs), most + 1)), 0.0
    for index, (cost, draft_length) in enumerate(zip(costs, draft_lengths, strict=True)):
        for nodes in range(most + 1):
            drafting = searching + cost.drafting(draft_length if nodes else 0)
            # As in `RoundCosts.round_seconds`, a round is no faster than a forward.
            seconds[index, nodes] = max(drafting + cost.verification(1 + nodes) + cost.overhead, cost.target[1])
        searching += cost.drafting(0)
    return seconds


def text_seconds(
    costs: Sequence[RoundCosts], sizes: Sequence[np.ndarray], draft_lengths: Sequence[int], rows: int = 1
) -> list[float]:
    """Return the seconds of each text's rounds, without its prompt, where S drafters take turns over `rows` rows.

    `sizes` are each text's rounds by drafter and number of drafted tokens, (≤ S, ≤ K + 1): `TextReplay.sizes`.
    """
    sizes_NSK = stack_sizes(sizes, len(costs))
    prices_SK, all_SK = turn_seconds(costs, draft_lengths, sizes_NSK.shape[2] - 1), sizes_NSK.sum(0)
    return [float((prices_SK * rounds_with_others(sizes_SK, all_SK, rows)).sum()) for sizes_SK in sizes_NSK]


def stack_sizes(sizes: Sequence[np.ndarray], drafters: int) -> np.ndarray:
    """Stack the rounds of N texts by drafter and number of drafted tokens, (N, S, K + 1)."""
    most = max(text.shape[1] for text in sizes)
    return np.stack([np.pad(text, ((0, drafters - len(text)), (0, most - text.shape[1]))) for text in sizes])


def rounds_with_others(sizes_SK: np.ndarray, others_SK: np.ndarray, rows: int) -> np.ndarray:
    """Return a row's rounds by the latest drafter and the largest draft of all its batch's rows, which set the time."""
    if rows == 1 or not others_SK.any():
        return sizes_SK
    # The other rows' rounds are taken as independent draws from `others_SK`. The cumulative sum of the batch's rounds
    # is P(no other row is beyond s or k) · the row's own rounds up to s and k; its increments are returned.
    within = others_SK.cumsum(0).cumsum(1) / others_SK.sum()
    together = sizes_SK.cumsum(0).cumsum(1) * within ** (rows - 1)
    return np.diff(np.diff(together, axis=0, prepend=0.0), axis=1, prepend=0.0)


@torch.inference_mode()
def verification_costs(
    target: PreTrainedModel, rows: int, context: int, tokens: Sequence[int], repeats: int = 5, compiled: bool = False
) -> dict[int, float]:
    """Measure t(k), the least seconds for blocks of k tokens after a context, for `rows` rows; sizes take turns."""
    model = CachedModel(target, rows, context, block=max(tokens), compiled=compiled)
    model.prefill(torch.ones(rows, context, dtype=torch.long, device=target.device))
    blocks = {k: torch.ones(rows, k, dtype=torch.long, device=target.device) for k in tokens}
    calls = {k: partial(model.feed, block, [context] * rows) for k, block in blocks.items()}
    return least_seconds(calls, repeats, target.device)
