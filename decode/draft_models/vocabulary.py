"""The logits that are tokens, and texts with tokens that have none."""

from collections.abc import Sequence

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from draftsmith.decode.errors import InputError


def token_count(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> int:
    """Return how many of a model's logits are tokens of its tokenizer, from the first: those behind them are padding.

    A tokenizer may have tokens behind all logits, as multimodal ones do (Gemma 3's `<image_soft_token>`): no text that
    a model writes has them.

    Args:
        tokenizer: the model's.
        config: the model's, which says how many logits there are.
    """
    return min(max(tokenizer.get_vocab().values()) + 1, config.get_text_config().vocab_size)


def require_logits(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, vocab_size: int, what: str) -> None:
    """Require that a model has a logit for every token of a text.

    Args:
        ids: the text's tokens.
        tokenizer: the model's.
        vocab_size: how many logits, and so embeddings, it has.
        what: the text's name, for the message.

    Raises:
        InputError: names the first such token.
    """
    beyond = next((token for token in ids if token >= vocab_size), None)
    if beyond is not None:
        raise InputError(
            f"{what}: expected tokens below the model's vocabulary of {vocab_size}, found "
            f"{tokenizer.convert_ids_to_tokens(beyond)!r}, which its tokenizer numbers {beyond}"
        )
