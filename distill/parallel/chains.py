"""The mask tokens of training texts, and the token that each mask learns (PARD, arXiv 2504.18583).

Every position with a loss is an anchor. Anchor a has masks j = 1, 2, … at positions a + j, and mask j learns the token
x_{a+j+1}, like the text's own position a + j. An anchor and its masks form a chain, the block that a parallel draft
proposes. A chain ends where the next token carries no loss.

Long chains cost most and teach least, so few chains are long (the paper's conditional drop of tokens). A mask is kept
only with all masks before it, since it attends to them.

Shape suffixes: B rows, T tokens of a row, M masks of a row, L = T + M, N positions of the text, E entries: all
positions and masks that learn, chain by chain; K tokens of a whole chain.
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

ALIGNED = 8  # the lengths of rows with masks are multiples of this, which matrix kernels prefer


def kept_shares(length: int, retention: float, minimum: float) -> np.ndarray:
    """Return the shares of anchors that keep mask j = 1…K − 1, max(retention^j, minimum), (K − 1,)."""
    return np.maximum(retention ** np.arange(1, length), minimum)


def draw_lengths(count: int, shares: np.ndarray, *seeds: int | str) -> np.ndarray:
    """Draw the number l of masks that each anchor keeps, (count,) int64, with P(l ≥ j) = `shares[j − 1]`."""
    # The seeds alone decide: a resumed run or another number of processes draws the same.
    u = np.random.default_rng(mixed_seed(*seeds)).random(count)
    return (u[:, None] < shares).sum(1)


def most_masks(tokens: int, shares: np.ndarray) -> int:
    """Return a bound for the masks of a row of `tokens` anchors: the mean plus three standard deviations."""
    mean = shares.sum()
    squares = (shares * (2 * np.arange(len(shares)) + 1)).sum()  # E[l²] = Σ_j (2j − 1) P(l ≥ j)
    return math.ceil(tokens * mean + 3 * math.sqrt(tokens * (squares - mean**2)))


@dataclass(frozen=True)
class Chains:
    """The masks of a batch, and the entries that learn. All tensors are int64."""

    positions_BM: Tensor  # the masks' positions in their texts
    anchors_BM: Tensor  # the positions of the masks' anchors; −1 for padding, which neither sees nor is seen
    texts_BL: Tensor | None  # the index of each entry's text in a packed row; None if rows are single texts
    entries_E: Tensor  # the indices of the entries in a flattened (B, L)
    indices_E: Tensor  # the index, among the N positions, of the one whose next token an entry learns
    spans_E: Tensor  # a copy of `indices_E` that stays on the CPU
    offsets_E: Tensor  # 0 for an anchor, j for its mask j

    def to(self, device: torch.device) -> "Chains":
        """Return a copy on a device."""

        def send(value: Tensor | None) -> Tensor | None:
            if value is None:
                return None
            # From pinned memory a GPU copies while the host continues.
            return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)

        moved: Any = {field.name: send(getattr(self, field.name)) for field in fields(self) if field.name != "spans_E"}
        return Chains(**moved, spans_E=self.spans_E)

    def take(self, values_BLX: Tensor) -> Tensor:
        """Select the values at the entries, (B, L, …) → (E, …)."""
        return values_BLX.flatten(0, 1).index_select(0, self.entries_E)

    def gather(self, teacher: LiveDistributions | WholeDistributions | CachedDistributions) -> GatheredDistributions:
        """Return the distributions that the entries learn, gathered from those of the N positions."""
        return GatheredDistributions(teacher, self.indices_E, self.spans_E)

    @property
    def work(self) -> tuple[int, int, int]:
        """The numbers of masks, of tokens that they see in total, themselves included, and of masks that learn."""
        return self.positions_BM.numel(), int((self.positions_BM + 1).sum()), int((self.offsets_E > 0).sum())


def make_chains(flat_N: Tensor, shape: Sequence[int], lengths_N: Tensor, positions_BT: Tensor | None = None) -> Chains:
    """Lay out the chains of a batch of `shape` (B, T), on the CPU, with anchors `LossPositions.flat_N`.

    `lengths_N` are the greatest numbers of masks; −1 leaves out the anchor too. `positions_BT` are the positions of
    packed rows, which restart at 0 with each text.
    """
    rows, width = shape
    lengths_N = torch.minimum(lengths_N, _room(flat_N))
    sizes_N = lengths_N + 1  # with the anchor
    # Entries are listed chain by chain; an entry's offset is its index less that of its anchor.
    anchor_E = torch.repeat_interleave(torch.arange(len(flat_N)), sizes_N)
    offsets_E = torch.arange(len(anchor_E)) - (sizes_N.cumsum(0) - sizes_N)[anchor_E]
    is_mask_E = offsets_E > 0
    row_E = flat_N[anchor_E] // width
    # A mask's column in its row: the number of masks before it, less those of earlier rows.
    before_E = is_mask_E.cumsum(0) - is_mask_E.long()
    count_B = torch.bincount(row_E[is_mask_E], minlength=rows)
    column_E = before_E - (count_B.cumsum(0) - count_B)[row_E]
    masks = int(count_B.max()) if rows else 0
    masks += -(width + masks) % ALIGNED
    position_E = flat_N[anchor_E] % width if positions_BT is None else positions_BT.flatten()[flat_N[anchor_E]]
    mask_cells = row_E[is_mask_E], column_E[is_mask_E]

    def scatter(value_E: Tensor, padding: int) -> Tensor:
        out_BM = torch.full((rows, masks), padding)
        out_BM[mask_cells] = value_E[is_mask_E]
        return out_BM

    texts_BL = None
    if positions_BT is not None:
        texts_BT = (positions_BT == 0).cumsum(1)
        texts_BL = torch.cat([texts_BT, scatter(texts_BT.flatten()[flat_N[anchor_E]], 0)], dim=1)
    # In a row of L entries the masks follow the T tokens.
    column_E = torch.where(is_mask_E, width + column_E, flat_N[anchor_E] % width)
    return Chains(
        scatter(position_E + offsets_E, 0),
        scatter(position_E, -1),
        texts_BL,
        row_E * (width + masks) + column_E,
        anchor_E + offsets_E,
        anchor_E + offsets_E,
        offsets_E,
    )


def _room(flat_N: Tensor) -> Tensor:
    """Return the number of positions that follow each position without a gap."""
    number_N = torch.arange(len(flat_N))
    ends_N = torch.ones(len(flat_N), dtype=torch.bool)
    ends_N[:-1] = flat_N.diff() != 1
    last_N = ends_N.nonzero()[:, 0]  # of each run of positions
    return last_N[torch.searchsorted(last_N, number_N)] - number_N
