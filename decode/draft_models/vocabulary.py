"""Logits that belong to tokens, and tokens without a logit."""

from collections.abc import Sequence

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from draftsmith.decode.errors import InputError


def token_count(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> int:
    """Return how many of a model's logits belong to its tokenizer's tokens; later ones are padding."""
    # Multimodal tokenizers have tokens after all logits (Gemma 3's `<image_soft_token>`), which a model never writes.
    return min(max(tokenizer.get_vocab().values()) + 1, config.get_text_config().vocab_size)


def require_logits(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, vocab_size: int, what: str) -> None:
    """Raise an `InputError` that names the first token of the text `what` for which a model has no logit."""
    beyond = next((token for token in ids if token >= vocab_size), None)
    if beyond is not None:
        raise InputError(
            f"{what}: expected tokens below the model's vocabulary of {vocab_size}, found "
            f"{tokenizer.convert_ids_to_tokens(beyond)!r}, which its tokenizer numbers {beyond}"
        )
