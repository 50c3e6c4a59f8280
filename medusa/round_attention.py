"""The attention of a round's later steps, for all rounds at once: to the text before it, and to its own steps.

Step 0 makes keys at all positions of a text. Step k of the round that begins at position s attends to those up to s,
and to one key of each of its own steps 1 … k. Tensors of step k have an entry for each round: so all steps see the keys
of step 0 through the same causal mask, and the key of step j is the entry with the same index.

Shape suffixes: B rows, T positions, S = T − k rounds of a step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from draftsmith.decode.cache.kernels import additive_mask, computing_dtype, flash_takes, fused_attention, repeat_heads
from draftsmith.decode.errors import InputError
from draftsmith.medusa.target_states import KeysValues

CHUNK = 1024
"""The queries of a window that are computed at a time: their mask has no entry for keys before it."""
SPARE = 8
"""The columns added to keys and values: attention kernels need widths that are multiples of 8."""
Attend = Callable[[Tensor, KeysValues], Tensor]
"""A function from queries, and the same positions' keys and values, to attended values, (B, heads, T, width)."""


def same_text(texts_BT: Tensor) -> Tensor:
    """Return the causal mask within texts, (B, 1, T, T) bool: a position sees those up to itself in its text."""
    causal_TT = torch.ones(2 * texts_BT.shape[1:], dtype=torch.bool, device=texts_BT.device).tril()
    return ((texts_BT[:, :, None] == texts_BT[:, None, :]) & causal_TT)[:, None]


def windowed_attention(queries: Tensor, seen: KeysValues, window: int, scale: float | None = None) -> Tensor:
    """Attend to `window` positions, a query's own included; the queries are at the last of the keys' positions."""
    count, length, parts = queries.shape[2], seen.keys.shape[2], list[Tensor]()
    for begin in range(0, max(count, 1), CHUNK):
        chunk = queries[:, :, begin : begin + CHUNK]
        last = length - count + begin + chunk.shape[2]
        keys, values = (states[:, :, max(0, last - chunk.shape[2] - window + 1) : last] for states in seen)
        order = torch.arange(keys.shape[2], device=keys.device)
        distance = order[len(order) - chunk.shape[2] :, None] - order
        mask = additive_mask((distance >= 0) & (distance < window), computing_dtype(chunk))
        parts.append(fused_attention(chunk, keys, values, mask, is_causal=False, scale=scale))
    return torch.cat(parts, 2)


class FeatureKeys:
    """Keys and values of step 0 for `heads` query heads, with a sink before them: a key with a score for each query.

    The softmax over all keys of a round splits into two. The round's own keys are few: their part is computed entry by
    entry. The keys of step 0 are as many as positions: the library's kernel computes their part without T × T scores,
    but does not return the sum of their exponentials, which weighs the parts. So the kernel gets one more key, the
    sink. Its score is the logarithm of the other part's sum, and its value returns the weight that it got.

    `current` has the shape (B, key heads, T, width); `visible` is the mask of `same_text`, or None: causal. `scale`
    multiplies scores; width^−½ if None. `windowed` says that rounds will have a window, and so a mask.
    """

    def __init__(
        self,
        current: KeysValues,
        heads: int,
        visible: Tensor | None,
        scale: float | None = None,
        windowed: bool = False,
    ):
        self.scale = current.keys.shape[-1] ** -0.5 if scale is None else scale
        # The score passes through the queries' dtype: what bfloat16 rounds off goes through a second entry.
        self.keys = nn.functional.pad(current.keys, (0, SPARE, 1, 0))
        self.keys[:, :, 0, -2:] = 1.0
        self.values = nn.functional.pad(current.values, (0, SPARE, 1, 0))
        self.values[:, :, 0, -1] = 1.0
        if not flash_takes(self.keys, windowed or visible is not None):  # repeat them here, once for all steps
            self.keys, self.values = repeat_heads(self.keys, heads), repeat_heads(self.values, heads)
        self.visible: Tensor | None = None
        if visible is not None:  # the sink's own query sees only the sink
            self.visible = nn.functional.pad(visible, (1, 0, 1, 0))
            self.visible[..., 0] = True

    @cached_property
    def mask(self) -> Tensor | None:
        """The mask of all rounds, if they don't have a window."""
        return None if self.visible is None else additive_mask(self.visible, computing_dtype(self.keys))

    def attend(self, queries: Tensor, scores: Tensor, first: int = 0, span: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the attended values times their weight, (B, heads, S, width), and the sink's weight, (B, heads, S, 1).

        `queries` are those of S rounds from the `first` on, (B, heads, S, width); `scores` are the sink's, float32,
        (B, heads, S). They see `span` positions up to their round's beginning, if that is given.
        """
        rounds, width = queries.shape[2], self.values.shape[-1] - SPARE
        seen, mask = slice(first + rounds + 1), self._mask(first, rounds, span)
        scaled, dtype = scores * (1 / self.scale), computing_dtype(queries)
        coarse = scaled.detach().to(dtype)
        fine = (scaled - coarse).to(dtype)
        at_sink = nn.functional.pad(torch.stack([coarse, fine], dim=-1), (SPARE - 2, 0))
        outputs = fused_attention(
            nn.functional.pad(torch.cat([queries, at_sink], dim=-1), (0, 0, 1, 0)),
            self.keys[:, :, seen],
            self.values[:, :, seen],
            mask,
            is_causal=mask is None,
            scale=self.scale,
        )[:, :, 1:]
        return outputs[..., :width], outputs[..., -1:]

    def _mask(self, first: int, rounds: int, span: int | None) -> Tensor | None:
        """Return the mask of the sink's own query and those of rounds from the `first` on; None if causal from 0."""
        if span is not None:
            order = torch.arange(first + rounds + 1, device=self.keys.device)
            distance = order[first:, None] - order
            seen = (distance >= 0) & (distance < span)
            seen[:, 0] = True  # the sink
            if self.visible is not None:
                seen = seen & self.visible[..., first : first + rounds + 1, : first + rounds + 1]
            return additive_mask(seen, computing_dtype(self.keys))
        if self.mask is not None:
            return self.mask[..., first : first + rounds + 1, : first + rounds + 1]
        if not first:
            return None
        # Kernels count causal positions from the first query and the first key.
        order = torch.arange(first + rounds + 1, device=self.keys.device)
        return additive_mask(order <= order[first:, None], computing_dtype(self.keys))


def round_attention(
    feature_keys: FeatureKeys,
    drafted: Sequence[KeysValues],
    sinks: Tensor | None = None,
    first: int = 0,
    span: int | None = None,
) -> Attend:
    """Return the attention of step k: to the keys of step 0 up to the round's beginning, and to the round's own.

    `drafted` holds the keys and values of the steps 1 … k − 1, of rounds from the `first` on. `sinks`, (heads,), are
    scores of the model's own whose weight goes nowhere (gpt-oss, MiMo V2). `span` is as in `FeatureKeys.attend`.
    """

    def attend(queries: Tensor, current: KeysValues) -> Tensor:
        rounds = queries.shape[2]
        parts = [KeysValues(*(states[:, :, None, :rounds] for states in part)) for part in (*drafted, current)]
        grouped = queries.unflatten(1, (current.keys.shape[1], -1))
        # The round's own keys: one score a step, from the entry with the same index.
        scores = torch.stack([(grouped * part.keys).sum(-1, dtype=torch.float32) for part in parts])
        scores = scores * feature_keys.scale
        if sinks is not None:
            at_sinks = sinks.float().view(grouped.shape[1:3])[..., None].expand_as(scores[:1])
            scores = torch.cat([scores, at_sinks])
        attended, weight = feature_keys.attend(queries, scores.logsumexp(0).flatten(1, 2), first, span)
        shares = scores.softmax(0)[: len(parts)].to(queries.dtype)
        own = torch.stack([share[..., None] * part.values for share, part in zip(shares, parts, strict=True)]).sum(0)
        return attended + weight * own.flatten(1, 2)

    return attend


class Rounds:
    """The attention of one layer in all steps of all rounds, in place of the library's; see `round_attention`.

    `visible`, (B, 1, T, T) bool, is the mask of `same_text`, None in rows of one text; `window` the positions that a
    step sees, itself included, None for all.
    """

    def __init__(self, visible: Tensor | None, window: int | None):
        self.visible, self.window = visible, window
        self.steps: list[KeysValues] = []
        self.first = 0  # the first of the rounds whose later steps `attend` takes
        self._feature_keys: FeatureKeys | None = None

    def after(
        self,
        steps: Sequence[KeysValues],
        heads: int,
        scale: float | None = None,
        sinks: Tensor | None = None,
        first: int = 0,
    ) -> Attend:
        """Return the attention of the step after those with these keys and values, to be called any number of times.

        `heads` are the queries'. Step 0 is of all positions; later ones are of the rounds from the `first` on. `sinks`
        are as in `round_attention`.
        """
        k, window = len(steps), self.window
        if k == 0:
            return lambda queries, current: self._begin(queries, current, scale, sinks)
        if self._feature_keys is None:
            self._feature_keys = FeatureKeys(steps[0], heads, self.visible, scale, window is not None)
        if window is None:
            return round_attention(self._feature_keys, steps[1:], sinks, first)
        # Step k is k positions after its round's beginning, the last position of step 0 that it sees.
        return round_attention(self._feature_keys, steps[max(1, k + 1 - window) :], sinks, first, window - k)

    def attend(self, queries: Tensor, current: KeysValues, scale: float, sinks: Tensor | None) -> Tensor:
        """Return the values that the next step attends to, (B, heads, S, width), and remember its keys and values."""
        attended = self.after(self.steps, queries.shape[1], scale, sinks, self.first)(queries, current)
        self.steps.append(current)
        return attended

    def _begin(self, queries: Tensor, current: KeysValues, scale: float | None, sinks: Tensor | None) -> Tensor:
        if sinks is not None:
            feature_keys = FeatureKeys(current, queries.shape[1], self.visible, scale, self.window is not None)
            return feature_keys.attend(queries, sinks.float()[:, None].expand(queries.shape[:3]), 0, self.window)[0]
        if self.window is not None and self.visible is None:
            return windowed_attention(queries, current, self.window, scale)
        visible = self.visible
        if visible is not None and self.window is not None:
            order = torch.arange(queries.shape[2], device=queries.device)
            visible = visible & (order[:, None] - order < self.window)
        mask = None if visible is None else additive_mask(visible, computing_dtype(queries))
        return fused_attention(queries, *current, mask, is_causal=mask is None, scale=scale)

    @contextmanager
    def of(self, config: PretrainedConfig) -> Iterator[None]:
        """Let the library's layers with this config attend so, in this block."""
        own: Any = config._attn_implementation
        token = _CURRENT.set(self)
        config._attn_implementation = NAME
        try:
            yield
        finally:
            config._attn_implementation = own
            _CURRENT.reset(token)


NAME = "draftsmith_rounds"
_CURRENT: ContextVar[Rounds] = ContextVar(NAME)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if odd := [name for name in ("softcap", "position_bias") if others.get(name) is not None]:
        raise InputError(f"mtp: expected attention by scaled products alone, found {odd[0]} in {type(module).__name__}")
    attended = _CURRENT.get().attend(query, KeysValues(key, value), scale, s_aux)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
