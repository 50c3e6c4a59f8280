"""The first mismatch of two texts at T=0, and whether it is a tie, where rounding decides the order of two logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.decode.sampling import Sampler

GREEDY = Sampler(LogitsProcessorList(), do_sample=False)
# In units of the dtype's spacing at the largest logit. On the embedded target in bfloat16, margins between the two
# likeliest tokens differed by up to 1.9 units among forwards of one token, of eight and of the whole text (8 positions
# in 12 texts); deeper models round more often.
TIE_ULPS = 8


@dataclass(frozen=True)
class Mismatch:
    """The first position where a text differs from plain decoding's."""

    position: int  # the index of the token in the text
    expected: int | None  # the plain text's token; None where the text has ended
    found: int | None  # the other text's token; None where the text has ended
    margin: float
    """The target's processed logit of `expected` less that of `found`, by one forward of the common beginning; infinite
    where a text ends."""
    tolerance: float  # the size of a tie in the model's dtype: 8 units in the last place of the largest logit

    @property
    def is_tie(self) -> bool:
        """True if rounding explains the difference."""
        return abs(self.margin) <= self.tolerance


def first_difference(text: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first different token, the shorter length if one text begins the other; None if equal."""
    for index, (token, other_token) in enumerate(zip(text, other, strict=False)):
        if token != other_token:
            return index
    return None if len(text) == len(other) else min(len(text), len(other))


@torch.inference_mode()
def first_mismatch(
    target: PreTrainedModel, plain: Tensor, other: Tensor, prompt_length: int, sampler: Sampler = GREEDY
) -> Mismatch | None:
    """Return the first mismatch of a text with plain decoding's at T=0, both (T,) int64 with the prompt; None if equal.

    In float32 texts should be equal. In half precision, forwards of one token and of several round differently, so that
    near-ties fall either way.
    """
    if plain.ndim != 1 or other.ndim != 1:
        raise InputError(f"texts: expected vectors (T,), found shapes {tuple(plain.shape)} and {tuple(other.shape)}")
    if not 1 <= prompt_length <= len(plain) or not torch.equal(plain[:prompt_length], other[:prompt_length]):
        raise InputError(f"texts: expected the same prompt of {prompt_length} ≥ 1 tokens, found different ones")
    position = first_difference(plain.tolist(), other.tolist())
    if position is None:
        return None
    context = plain[:position]
    logits = target(input_ids=context[None], use_cache=False).logits[0, -1:]  # (1, V)
    scores = sampler.scores(logits, [context])[0]
    tolerance = TIE_ULPS * torch.finfo(target.dtype).eps * float(logits.abs().max())
    if position == min(len(plain), len(other)):
        ends = [int(text[position]) if len(text) > position else None for text in (plain, other)]
        return Mismatch(position, ends[0], ends[1], float("inf"), tolerance)
    expected, found = int(plain[position]), int(other[position])
    return Mismatch(position, expected, found, float(scores[expected] - scores[found]), tolerance)
