"""How many logits are tokens."""

from transformers import PreTrainedTokenizerBase


def tokenizer_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of logits that are tokens: the largest id plus one, whatever padding a head has."""
    return max(tokenizer.get_vocab().values()) + 1
