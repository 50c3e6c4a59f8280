"""Attention masks of the blocks that `CachedModel` feeds, in the form that the library's layers take.

Shape suffixes: B rows, K tokens of a block, N slots up to the block's end, S slots.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.layers import Block


class Masks:
    """Makes the additive masks of a model's blocks, in its dtype unless another is given, on its device.

    `types` are the kinds of its layers, if its config names any. A token of a sliding layer attends to `window`
    positions; 0 without such layers. `slots_S` is 0 … S − 1 on the device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        types: Sequence[str],
        window: int,
        slots_S: Tensor,
        dtype: torch.dtype | None = None,
    ):
        self._dtype, self._device = model.dtype if dtype is None else dtype, model.device
        self._minimum = torch.finfo(self._dtype).min
        self._types, self._window, self._slots_S = types, window, slots_S
        self._causal: dict[int, Tensor] = {}

    def of_block(
        self,
        block: Block,
        rows: int,
        positions: Tensor,
        cached_BS: Tensor | None,
        visible: Tensor | None,
        by_depth: bool,
    ) -> Any:
        """Return a block's mask, a dictionary by layer type where there are types; None where none is needed.

        `positions` are its tokens', (1 or B, K), those of a tree's nodes if `by_depth`. `cached_BS` has the position of
        each slot's token, where layers have a window. `visible` marks the last N slots that each token attends to, (K,
        N) or (B, K, N) bool; None is causal.
        """
        k = positions.shape[1]
        if visible is not None or block.start is None or (by_depth and self._window):
            return self.by_slot(block, positions.expand(rows, k), cached_BS, visible)
        if k > 1 and not self._window:
            # A causal block at one length for all rows: the library's own mask would cost more than all bookkeeping.
            if k not in self._causal:
                above = torch.full((1, 1, k, k), self._minimum, dtype=self._dtype, device=self._device).triu(1)
                self._causal[k] = above
            return self._by_type(torch.nn.functional.pad(self._causal[k], (block.start, 0)))
        if k == 1 and self._window and self._types:
            return dict.fromkeys(self._types)  # one token attends to all slots that a layer returns
        return None

    def by_slot(self, block: Block, positions_BK: Tensor, cached_BS: Tensor | None, visible: Tensor | None) -> Any:
        """Return the mask of a block whose rows begin at different slots; see `of_block`."""
        rows, k = positions_BK.shape
        slots = self._slots_S[: block.width]
        if visible is None:
            allowed = (slots <= block.slots[:, :, None]).expand(rows, k, -1)
        else:
            n = visible.shape[-1]
            # All slots before the last n, and of those the ones that `visible` marks.
            base = (block.slots[:, :1] + k - n).clamp(min=0)  # rows that have ended are at slot 0
            allowed = (slots < base[:, :, None]).expand(rows, k, -1).clone()
            last = base + torch.arange(n, device=visible.device)
            allowed.scatter_(2, last[:, None, :].expand(rows, k, n), visible.expand(rows, k, n))
        if cached_BS is None:
            return self._by_type(self._additive(allowed))
        full = self._additive(allowed) if "full_attention" in self._types else allowed
        attended = slice(block.reach, block.width)
        near = positions_BK[:, :, None] - cached_BS[:, None, attended] < self._window
        return self._by_type(full, self._additive(allowed[:, :, attended] & near))

    def _additive(self, allowed: Tensor) -> Tensor:
        """Return (B, 1, K, S): 0 where a slot may be attended to."""
        mask = torch.zeros(allowed.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~allowed, self._minimum)[:, None]

    def _by_type(self, full: Tensor, windowed: Tensor | None = None) -> Any:
        windowed = full if windowed is None else windowed
        if self._types:
            return {name: windowed if name == "sliding_attention" else full for name in self._types}
        return windowed
