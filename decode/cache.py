"""Key-value caches that can be rolled back."""

from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from draftsmith.decode.errors import InputError


def new_cache() -> DynamicCache:
    """Return an empty cache that keeps every token.

    Without the model's config the library's cache also keeps what lies past a sliding window (the mask still hides it),
    so that a rejected draft can be removed at any length.
    """
    return DynamicCache()


def forward(model: PreTrainedModel, input_ids: Tensor, cache: DynamicCache, keep: int) -> Tensor:
    """Feed tokens that follow the cached ones and return the logits of the last `keep` of them.

    Args:
        model: a causal LM.
        input_ids: (1, T); a whole prompt and a draft may come in one call, of which few logits are needed.
        cache: holds the tokens before them, and these too afterwards.
        keep: at most T.

    Returns:
        (keep, V).
    """
    # Without it a long prompt's logits over a large vocabulary would be the largest tensor of the whole run.
    inputs: dict[str, Any] = {"input_ids": input_ids, "past_key_values": cache, "use_cache": True}
    supported: Any = model._supports_logits_to_keep
    if keep < input_ids.shape[1] and supported():  # it inspects a signature: too slow to ask at every step
        inputs["logits_to_keep"] = keep
    return model(**inputs).logits[0, -keep:]


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
