"""Attention masks of the blocks that `CachedModel` feeds, in the form that the library's layers take.

Shape suffixes: B rows, K tokens of a block, N slots up to the block's end, S slots.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.layers import Block
from draftsmith.decode.cache.states import HYBRIDS, STATES, layer_kinds

WINDOWED = ("sliding_attention", "hybrid_sliding")


class Masks:
    """Makes the additive masks of a model's blocks, in its dtype unless another is given, on its device.

    `slots_S` is 0 … S − 1 on the device.
    """

    def __init__(self, model: PreTrainedModel, slots_S: Tensor, dtype: torch.dtype | None = None):
        self._dtype, self._device = model.dtype if dtype is None else dtype, model.device
        self._minimum = torch.finfo(self._dtype).min
        config = model.config.get_text_config()
        kinds, self._slots_S = {*layer_kinds(config)[0]}, slots_S
        self._attends = bool(kinds - {*STATES, "dummy"})
        # The names under which a model looks for its masks; none if one mask serves all. Models with states name those
        # of their attention and of their states, under any names of layers.
        self._types = {*(getattr(config, "layer_types", None) or ())}
        if kinds & {*STATES, *HYBRIDS}:
            self._types |= {"full_attention", "sliding_attention", *STATES}
        self._window, self._chunk = spans_of(config)
        self._two_sided = getattr(config, "is_causal", None) is False  # of block drafters
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
        if not self._attends:
            return None
        # An index's layers need a mask, which no model makes of a dictionary.
        indexed = self._window and "indexed_attention" in self._types
        if visible is not None or block.start is None or (by_depth and self._window) or self._chunk or indexed:
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
        windowed = chunked = None
        if self._window:
            attended = slice(block.reach, block.width)
            distance = positions_BK[:, :, None] - cached_BS[:, None, attended]
            near = distance < self._window
            # `visible` may show tokens after its own, which layers with a window never see.
            near = near if self._two_sided else near & (distance >= 0)
            windowed = self._additive(allowed[:, :, attended] & near)
        if self._chunk:
            chunks = positions_BK[:, :, None] // self._chunk
            chunked = self._additive(allowed & (chunks == cached_BS[:, None, : block.width] // self._chunk))
        full = self._additive(allowed) if self._types - {*WINDOWED, "chunked_attention"} else allowed
        return self._by_type(full, windowed, chunked)

    def _additive(self, allowed: Tensor) -> Tensor:
        """Return (B, 1, K, S): 0 where a slot may be attended to."""
        mask = torch.zeros(allowed.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~allowed, self._minimum)[:, None]

    def _by_type(self, full: Tensor, windowed: Tensor | None = None, chunked: Tensor | None = None) -> Any:
        windowed = full if windowed is None else windowed
        if not self._types:
            return windowed
        others = dict.fromkeys(WINDOWED, windowed) | dict.fromkeys(STATES) | {"chunked_attention": chunked}
        return {name: others.get(name, full) for name in self._types}


def count_slots(model: PreTrainedModel) -> None:
    """Let a model with ALiBi make its biases for our blocks; those that the library makes stay as they are."""
    decoder: Any = model.base_model
    if hasattr(decoder, "build_alibi_tensor"):
        decoder.build_alibi_tensor = _bloom_biases
    elif hasattr(decoder, "build_mpt_alibi_tensor"):
        decoder.build_mpt_alibi_tensor = _mpt_biases


def _bloom_biases(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Any:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    # Our masks are by query, (B, 1, K, S), where the library expects one of padding, (B, S).
    attended = mask if mask.ndim == 2 else mask.new_ones(len(mask), mask.shape[-1], dtype=torch.long)
    return build_alibi_tensor(attended, num_heads, dtype)


def _mpt_biases(num_heads: int, sequence_length: int, alibi_bias_max: int = 8, device: Any = None) -> Any:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    # A block's padding may lie after the last position; the model takes the last slots of what it gets.
    return build_mpt_alibi_tensor(num_heads, 2 * sequence_length, alibi_bias_max, device)


def spans_of(config: Any) -> tuple[int, int]:
    """Return the positions in the window, and in a chunk, of layers that have one, by a text config; 0 without."""
    chunk = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    return getattr(config, "sliding_window", None) or 0, config.attention_chunk_size if chunk else 0
