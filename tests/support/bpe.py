"""Tokenizers for tests, like the embedded pair's."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"


def train_bpe(texts: Iterable[str], vocab_size: int, words: str | None = None) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which encodes every string and decodes it back to itself.

    `vocab_size` includes the 256 bytes and two special tokens (end of text, padding); `words` splits texts.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    if words is not None:
        steps = [pre_tokenizers.Split(Regex(words), "isolated"), tokenizer.pre_tokenizer]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
