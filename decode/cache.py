"""Key-value caches that can be rolled back."""

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from draftsmith.decode.errors import InputError


def new_cache() -> DynamicCache:
    """Return an empty cache that keeps every token.

    Without the model's config the library's cache also keeps what lies past a sliding window (the mask still hides it),
    so that a rejected draft can be removed at any length.
    """
    return DynamicCache()


def prefill(model: PreTrainedModel, input_ids: Tensor, cache: DynamicCache) -> None:
    """Feed tokens (1, T) into a cache without computing logits; T may be 0."""
    if input_ids.shape[1]:
        model.base_model(input_ids=input_ids, past_key_values=cache, use_cache=True)


def rollback(cache: DynamicCache, tokens: int) -> None:
    """Drop the last `tokens` tokens of a cache; 0 drops nothing."""
    if tokens > 0:
        cache.crop(-tokens)


def require_rollback(model: PreTrainedModel, role: str) -> None:
    """Refuse, by name, models that speculative decoding cannot roll back or does not apply to.

    Raises:
        InputError: the model carries a recurrent state, or is an encoder-decoder.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise InputError(f"{role}: expected a decoder-only model, found the encoder-decoder {name}")
    if model._is_stateful:
        raise InputError(
            f"{role}: expected a model with a key-value cache, found {name}, whose recurrent state cannot drop "
            "rejected tokens"
        )
