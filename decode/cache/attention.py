"""Grouped-query attention over a cache without repeating it (Ainslie et al. 2023, "GQA").

For masks over more than one query, as after drafting, the library's `sdpa` copies all keys and values for each query
head that shares them. Here a group's queries become rows of one head: the cache is read once, with the same numbers.
"""

import threading
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from draftsmith.decode.cache.kernels import flash_takes, repeat_heads

NAME = "draftsmith_grouped"
KEPT = 256  # most queries whose mask's rows are kept for all layers; those of a long prompt would fill the memory


class _LastMask(threading.local):
    """The mask of this thread's forward, and its rows for the queries of a group: all layers have the same one."""

    mask: Tensor | None = None
    groups: int = 0
    rows: Tensor | None = None


_LAST = _LastMask()


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as the library's `sdpa` does, with its interface for attention functions.

    `query` is (B, H, K, D), `key` and `value` are (B, H/G, S, D), and an `attention_mask` is additive, (B, 1, K, S): B
    rows, H query heads, G of them a key head, K queries, S slots, D head width. `scaling` is 1/√D if None. With a
    softcap or position bias among `kwargs`, `sdpa` itself runs. Returns (B, K, H, D), and None for weights.
    """
    heads, length = query.shape[1:3]
    groups = heads // key.shape[1]
    # A prompt without a mask is left to the library's causal kernels.
    packs = length == 1 if attention_mask is None else attention_mask.shape[1] == 1
    if groups == 1 or not packs or any(kwargs.get(name) is not None for name in ("softcap", "position_bias")):
        if attention_mask is None and groups > 1 and not flash_takes(query):  # the only kernel that takes groups
            key, value = repeat_heads(key, heads), repeat_heads(value, heads)
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    attend = in_groups
    if attention_mask is not None and not torch.compiler.is_exporting() and 1 < length <= KEPT:
        if _LAST.mask is not attention_mask or _LAST.groups != groups:
            _LAST.mask, _LAST.groups = attention_mask, groups
            _LAST.rows = attention_mask.repeat(1, 1, groups, 1)
        attend, attention_mask = _packed, _LAST.rows
    states = attend(query, key, value, attention_mask, dropout_p=dropout, scale=scaling)
    return states.transpose(1, 2).contiguous(), None


def in_groups(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """Attend with the queries of a group as rows of one head, without copies of keys and values.

    `query` and the result are (B, H, K, D), `key` and `value` (B, H/G, S, D). `mask` is additive, (B or 1, 1, K, S).
    """
    if mask is not None and query.shape[2] > 1:  # one query's mask serves all rows of the head
        mask = mask.repeat(1, 1, query.shape[1] // key.shape[1], 1)
    return _packed(query, key, value, mask, **options)


def _packed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """Attend as `in_groups` does, with a mask that has the rows of all queries of a group."""
    rows, heads, length, width = query.shape
    groups = heads // key.shape[1]
    packed = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, heads // groups, groups * length, width), key, value, attn_mask=mask, **options
    )
    return packed.reshape(rows, heads, length, -1)


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def implementation_of(model: PreTrainedModel) -> str:
    """Return the attention that a model was loaded with, even while another thread's forward replaces it."""
    name = model.config.get_text_config()._attn_implementation
    return "sdpa" if name == NAME else name


def attends_in_groups(model: PreTrainedModel) -> bool:
    """Return whether a model runs the library's `sdpa` through its interface, and query heads share key heads."""
    config = model.config.get_text_config()
    layers = config.per_layer_config if config.is_heterogeneous else [config]  # layers may differ in their heads
    heads = [[getattr(layer, f"num_{of}_heads", None) for of in ("attention", "key_value")] for layer in layers]
    by_interface = implementation_of(model) == "sdpa" and type(model)._can_set_attn_implementation()
    return by_interface and any(isinstance(keys, int) and keys != queries for queries, keys in heads)


class Grouped:
    """A context in which forwards of a model that `attends_in_groups` run `grouped_attention`."""

    def __init__(self, model: PreTrainedModel):
        # The config's own setter checks types and looks for further configs, which takes 0.1 ms a forward.
        self._config = vars(model.config.get_text_config())

    def __enter__(self) -> None:
        self._config["_attn_implementation_internal"] = NAME

    def __exit__(self, *_: object) -> None:
        _LAST.mask = _LAST.rows = None
        # If two threads run one model, the first to end restores `sdpa` for both: slower, with the same numbers.
        self._config["_attn_implementation_internal"] = "sdpa"
