"""The masks behind a text's tokens, and the token that each learns (PARD, arXiv 2504.18583).

Every place where a loss is taken is an anchor. Behind anchor a stand masks j = 1, 2, … at positions a + j, and mask j
learns the token after its position, x_{a+j+1}, as the place a + j of the text does. An anchor and its masks are a
chain, which is the block that a parallel draft proposes. A chain ends where the next token carries no loss.

Long chains cost most and teach least, so few of them are long (the paper's conditional drop of tokens): a mask is kept
only with all masks before it, since it attends to them.

Shape suffixes: B rows, T tokens of a row, M masks of a row, L = T + M, N places of the text, E entries: all places and
masks that learn, chain by chain; K tokens of a whole chain.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.train.data.samples import mixed_seed
from draftsmith.train.losses.distributions import (
    CachedDistributions,
    GatheredDistributions,
    LiveDistributions,
    WholeDistributions,
)

ALIGNED = 8
"""Rows with masks have a multiple of this many entries, which matrix kernels prefer."""


def kept_shares(length: int, retention: float, minimum: float) -> np.ndarray:
    """Return the share of anchors that keep mask j = 1…K − 1: max(retention^j, minimum), (K − 1,)."""
    return np.maximum(retention ** np.arange(1, length), minimum)


def drawn_lengths(count: int, shares: np.ndarray, *seeds: int | str) -> np.ndarray:
    """Draw how many masks each of some anchors keeps, (count,) int64: at least j with the probability `shares[j − 1]`.

    The seeds alone decide, so that neither a resumed run nor another number of processes draws otherwise.
    """
    u = np.random.default_rng(mixed_seed(*seeds)).random(count)
    return (u[:, None] < shares).sum(1)


def most_masks(tokens: int, shares: np.ndarray) -> int:
    """Return the masks of a row of `tokens` that all carry a loss: the mean and three standard deviations."""
    mean = shares.sum()
    squares = (shares * (2 * np.arange(len(shares)) + 1)).sum()  # E[l²] = Σ_j (2j − 1) P(l ≥ j)
    return math.ceil(tokens * mean + 3 * math.sqrt(tokens * (squares - mean**2)))


@dataclass(frozen=True)
class Chains:
    """The masks of a batch, and the entries that learn. All are int64."""

    positions_BM: Tensor
    """The masks' positions in their texts."""
    anchors_BM: Tensor
    """Their anchors' positions; −1 of what fills up a row, which sees no text and is seen by none."""
    texts_BL: Tensor | None
    """Which text of a packed row an entry belongs to; None where rows are single texts."""
    entries_E: Tensor
    """Where the entries lie in a flattened (B, L)."""
    places_E: Tensor
    """Of the N places, the one whose next token an entry learns."""
    spans_E: Tensor
    """The same, on the CPU for good."""
    offsets_E: Tensor
    """0 of an anchor, j of its mask j."""

    def to(self, device: torch.device) -> "Chains":
        """Return them on a device, without waiting for it: a GPU copies from pinned memory while the host goes on."""

        def sent(value: Tensor | None) -> Tensor | None:
            if value is None:
                return None
            return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)

        moved: Any = {field.name: sent(getattr(self, field.name)) for field in fields(self) if field.name != "spans_E"}
        return Chains(**moved, spans_E=self.spans_E)

    def take(self, values_BLX: Tensor) -> Tensor:
        """Return what a tensor has at the entries, (B, L, …) → (E, …)."""
        return values_BLX.flatten(0, 1).index_select(0, self.entries_E)

    def gathered(self, teacher: LiveDistributions | WholeDistributions | CachedDistributions) -> GatheredDistributions:
        """Return the distributions that the entries learn, of those of the N places."""
        return GatheredDistributions(teacher, self.places_E, self.spans_E)

    @property
    def work(self) -> tuple[int, int, int]:
        """How many masks there are, how many tokens they see in all, themselves included, and how many learn."""
        return self.positions_BM.numel(), int((self.positions_BM + 1).sum()), int((self.offsets_E > 0).sum())


def chained(flat_N: Tensor, shape: Sequence[int], lengths_N: Tensor, positions_BT: Tensor | None = None) -> Chains:
    """Lay out the chains of a batch, on the CPU.

    Args:
        flat_N: the anchors, `LossPositions.flat_N`.
        shape: B and T.
        lengths_N: masks that each may have; fewer where the tokens that carry a loss end. −1 for a place that is left
            out, which learns nothing.
        positions_BT: of packed rows, restarting at 0 with each text.
    """
    rows, width = shape
    lengths_N = torch.minimum(lengths_N, _room(flat_N))
    sizes_N = lengths_N + 1  # with the anchor
    anchor_E = torch.repeat_interleave(torch.arange(len(flat_N)), sizes_N)
    offsets_E = torch.arange(len(anchor_E)) - (sizes_N.cumsum(0) - sizes_N)[anchor_E]
    is_mask_E = offsets_E > 0
    of_row_E = flat_N[anchor_E] // width
    # The number of each mask in its row: how many there are before it, less those of earlier rows.
    number_E = is_mask_E.cumsum(0) - is_mask_E.long()
    in_row_B = torch.bincount(of_row_E[is_mask_E], minlength=rows)
    column_E = number_E - (in_row_B.cumsum(0) - in_row_B)[of_row_E]
    masks = int(in_row_B.max()) if rows else 0
    masks += -(width + masks) % ALIGNED
    position_E = flat_N[anchor_E] % width if positions_BT is None else positions_BT.flatten()[flat_N[anchor_E]]
    at = of_row_E[is_mask_E], column_E[is_mask_E]

    def filled(value_E: Tensor, other: int) -> Tensor:
        out_BM = torch.full((rows, masks), other)
        out_BM[at] = value_E[is_mask_E]
        return out_BM

    texts_BL = None
    if positions_BT is not None:
        texts_BT = (positions_BT == 0).cumsum(1)
        texts_BL = torch.cat([texts_BT, filled(texts_BT.flatten()[flat_N[anchor_E]], 0)], dim=1)
    column_E = torch.where(is_mask_E, width + column_E, flat_N[anchor_E] % width)
    return Chains(
        filled(position_E + offsets_E, 0),
        filled(position_E, -1),
        texts_BL,
        of_row_E * (width + masks) + column_E,
        anchor_E + offsets_E,
        anchor_E + offsets_E,
        offsets_E,
    )


def _room(flat_N: Tensor) -> Tensor:
    """Return how many places follow each without a gap."""
    number_N = torch.arange(len(flat_N))
    ends_N = torch.ones(len(flat_N), dtype=torch.bool)
    ends_N[:-1] = flat_N.diff() != 1
    last_N = ends_N.nonzero()[:, 0]  # of each run of places
    return last_N[torch.searchsorted(last_N, number_N)] - number_N
