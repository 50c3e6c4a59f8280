"""Checks that a model is causal and that its cache can be rolled back, and the size of that cache."""

import inspect
from functools import lru_cache
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from draftsmith.decode.cache.attention import implementation_of
from draftsmith.decode.cache.states import HYBRIDS, STATES, layer_kinds
from draftsmith.decode.cache.stepwise import classes_of, mentions, uses_states
from draftsmith.decode.errors import InputError

# Attention that takes any additive mask; the other, fast kernels take causal masks only.
ATTENTION = ("eager", "sdpa")
# The library's types of layers whose tokens can be dropped; "dummy" ones have no cache of their own.
KINDS = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention", *STATES, *HYBRIDS, "dummy"}
# The names by which modules take their tokens' positions from the library's cache, one for all rows.
COUNTERS = "get_query_offset", "indexer_position_ids"
# Models whose layers differ from their config, which no field shows.
UNFIT_TYPES = {"moshi": "whose config names a window that its layers do not have"}
# Families whose attention is biased by the distance of slots, which is that of positions in chains.
ALIBI = {"bloom", "mpt"}
# Families that are encoders unless their config says `is_decoder`.
ENCODERS = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation"}


def positions_of(config: PretrainedConfig) -> int | None:
    """Return the longest text that a model reads, in tokens, by its config; None without a limit."""
    text = config.get_text_config()
    return getattr(text, "max_position_embeddings", getattr(text, "max_seq_len", None))


def check_causal(model: PreTrainedModel, role: str) -> None:
    """Raise an `InputError` for encoders; training, replay, the target's cache and `generate` need no more."""
    name, config = type(model).__name__, model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise InputError(f"{role}: expected a decoder-only model, found the encoder-decoder {name}")
    if config.model_type in ENCODERS and not getattr(config, "is_decoder", False):
        raise InputError(f"{role}: expected causal attention, found {name} with is_decoder = False, an encoder")
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):  # "vision" concerns images only
        raise InputError(
            f"{role}: expected causal attention, found {name} with use_bidirectional_attention, an encoder"
        )


def check_rollback(model: PreTrainedModel, role: str) -> None:
    """Raise an `InputError` for models whose cache cannot drop rejected tokens and padding, and for encoders."""
    check_causal(model, role)
    name, config = type(model).__name__, model.config.get_text_config()
    if not hasattr(config, "num_hidden_layers"):  # BLT: an encoder and a decoder of bytes around its layers
        raise InputError(f"{role}: expected one stack of layers, found {name}, whose config has no num_hidden_layers")
    kinds, parameters = set(layer_kinds(config)[0]), parameters_of(model)
    if unknown := sorted(kinds - KINDS):
        raise InputError(
            f"{role}: expected layers of {', '.join(sorted(KINDS - {'dummy'}))}, found {', '.join(unknown)} in {name}"
        )
    stateful = kinds & {*STATES, *HYBRIDS}
    # A family with states may have none left, as an early exit or a carved draft; its config then names the layers.
    unnamed = model._is_stateful and not stateful and not getattr(config, "layer_types", None)
    if unnamed or (stateful and not uses_states(model)):
        raise InputError(
            f"{role}: expected a state in the library's cache, which can drop rejected tokens, found {name}, whose "
            "state is elsewhere"
        )
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo's layers apply a window of their own
        raise InputError(f"{role}: expected full or sliding attention layers, found local ones in {name}")
    if getattr(config, "alibi", False):
        raise InputError(f"{role}: expected positions by position_ids, found alibi in {name}")
    if config.model_type in UNFIT_TYPES:
        raise InputError(f"{role}: expected another model, found {name}, {UNFIT_TYPES[config.model_type]}")
    if not parameters & {"past_key_values", "cache_params"}:
        raise InputError(f"{role}: expected a model with a key-value cache, found {name}, which has none")
    if kinds - {*STATES, "dummy"} and "position_ids" not in parameters and config.model_type not in ALIBI:
        raise InputError(f"{role}: expected a model that takes position_ids, found {name}, which does not")
    classes = classes_of(model)
    if any(mentions(cls, counter) for cls in classes for counter in COUNTERS):
        raise InputError(f"{role}: expected positions by position_ids, found {name}, which counts them in the cache")
    if any(hasattr(cls, "create_position_ids_from_input_ids") for cls in classes):
        raise InputError(f"{role}: expected positions from 0 on, found {name}, whose own begin after pad_token_id")
    attention = implementation_of(model)
    if attention not in ATTENTION:
        raise InputError(
            f"{role}: expected attn_implementation {' or '.join(ATTENTION)}, found {attention}, which takes no masks"
        )


NO_PROGRAMS = "compiled programs: not for layers with states, an index, chunks or ALiBi; runs eagerly"


def runs_in_programs(model: PreTrainedModel) -> bool:
    """Return whether compiled programs can run a model: its layers have keys and values, and no more."""
    config, known = model.config.get_text_config(), {"full_attention", "sliding_attention", "dummy"}
    return config.model_type not in ALIBI and set(layer_kinds(config)[0]) <= known


def layers_with_states(config: PretrainedConfig) -> int:
    """Return how many layers have a recurrent or convolution state, by the config of a model."""
    return sum(kind in (*STATES, *HYBRIDS) for kind in layer_kinds(config.get_text_config())[0])


def follows_one_path(config: PretrainedConfig) -> bool:
    """Return whether a model takes no tree of drafted tokens, by its config: its paths share no state and no slots."""
    return layers_with_states(config) > 0 or config.get_text_config().model_type in ALIBI


@lru_cache(maxsize=64)
def _signature(cls: type) -> frozenset[str]:
    return frozenset(inspect.signature(cls.forward).parameters)  # type: ignore[attr-defined]


def parameters_of(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the forward's parameters."""
    cls: Any = type(model)
    return _signature(cls)


def cached_numbers(model: PreTrainedModel) -> int | None:
    """Return how many numbers a model caches per token, or None, by running it; the meta device will do."""
    layers = _layers_after_a_token(model)
    if layers is None:
        return None
    parts = [getattr(layer, name, None) for layer in layers for name in ("keys", "values", "indexer_keys")]
    return sum(part.numel() for part in parts if part is not None)


def state_bytes(model: PreTrainedModel, width: int | None = None) -> int:
    """Return the bytes of a row's states in all layers, whose number does not depend on its length; see `StateLayer`.

    `width` is the bytes of a number, by default the model's; recurrent states are kept in float32 all the same.
    """
    width, total = width or model.dtype.itemsize, 0
    for layer in _layers_after_a_token(model) or ():
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            tensors = [tensor for tensor in states.values() if tensor is not None]
            total += sum(t.numel() * (4 if t.dtype == torch.float32 else width) for t in tensors)
    return total


@torch.inference_mode()
def _layers_after_a_token(model: PreTrainedModel) -> list[Any] | None:
    """Return the layers of the library's cache of one token; None if the model does not run."""
    cache = DynamicCache(config=model.config)
    name = "past_key_values" if "past_key_values" in parameters_of(model) else "cache_params"
    inputs: Any = {"input_ids": torch.zeros(1, 1, dtype=torch.long, device=model.device), name: cache}
    try:
        model(**inputs, use_cache=True)
    except Exception:  # a step that needs real values: `check_rollback` judges models
        return None
    return list(cache.layers)
