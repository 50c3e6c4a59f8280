"""The first mismatch of two texts at T=0, and whether it is a tie: logits that rounding orders either way."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.decode.sampling import Sampler

GREEDY = Sampler(LogitsProcessorList(), do_sample=False)
# In units of the dtype's spacing at the largest logit. On the embedded target in bfloat16, forwards of one token, of
# eight and of the whole text gave margins between the two likeliest tokens that differed by up to 1.9 units (8 places
# of 12 texts); deeper models round more often.
TIE_ULPS = 8


@dataclass(frozen=True)
class Mismatch:
    """The first place where a text differs from plain decoding's."""

    position: int
    """The token's index in the text."""
    expected: int | None
    """The plain text's token; None where it ends before."""
    found: int | None
    """The other text's."""
    margin: float
    """The target's logit of `expected` less that of `found`, after the same processing, from one fresh forward of the
    shared beginning; infinite where a text ends."""
    tolerance: float
    """The size of a tie in the model's dtype: 8 units in the last place of the largest logit."""
    reference_margin: float | None = None
    """The margin by the reference model; None without one. It decides nothing."""

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains the difference. A decoder that is wrong differs by more."""
        return abs(self.margin) <= self.tolerance


def first_difference(text: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first token that differs.

    Returns:
        The shorter length if one text begins with the other; None if they are equal.
    """
    for place, (token, beside) in enumerate(zip(text, other, strict=False)):
        if token != beside:
            return place
    return None if len(text) == len(other) else min(len(text), len(other))


@torch.inference_mode()
def first_mismatch(
    target: PreTrainedModel,
    plain: Tensor,
    other: Tensor,
    prompt_length: int,
    sampler: Sampler = GREEDY,
    reference: PreTrainedModel | None = None,
) -> Mismatch | None:
    """Compare a text with plain decoding's at T=0.

    In float32 there should be none. In half precision a forward of one token and one of several round differently, so
    that near-ties fall either way; after the first the texts have nothing in common, so the first alone is judged.

    Args:
        target: the model that wrote both.
        plain: the text of plain decoding, prompt included, (T,) int64.
        other: the text to be judged, (T',).
        prompt_length: tokens of the prompt, which both share, at least 1.
        sampler: how the logits were processed.
        reference: the same weights in a wider dtype, to see how near the two tokens are where little is rounded.

    Returns:
        None where the texts are equal.

    Raises:
        InputError: texts that are no vectors or differ within the prompt, or a prompt without tokens.
    """
    if plain.ndim != 1 or other.ndim != 1:
        raise InputError(f"texts: expected vectors (T,), found shapes {tuple(plain.shape)} and {tuple(other.shape)}")
    if not 1 <= prompt_length <= len(plain) or not torch.equal(plain[:prompt_length], other[:prompt_length]):
        raise InputError(f"texts: expected the same prompt of {prompt_length} ≥ 1 tokens, found different ones")
    position = first_difference(plain.tolist(), other.tolist())
    if position is None:
        return None
    context = plain[:position]
    logits = _logits_after(target, context)
    scores = sampler.scores(logits, [context])[0]
    tolerance = TIE_ULPS * torch.finfo(target.dtype).eps * float(logits.abs().max())
    if position == min(len(plain), len(other)):
        ends = [int(text[position]) if len(text) > position else None for text in (plain, other)]
        return Mismatch(position, ends[0], ends[1], float("inf"), tolerance)
    expected, found = int(plain[position]), int(other[position])
    reference_margin = None
    if reference is not None:
        exact = sampler.scores(_logits_after(reference, context), [context])[0]
        reference_margin = float(exact[expected] - exact[found])
    return Mismatch(position, expected, found, float(scores[expected] - scores[found]), tolerance, reference_margin)


def _logits_after(model: PreTrainedModel, context: Tensor) -> Tensor:
    """Return the logits of the next token, (1, V)."""
    return model(input_ids=context[None], use_cache=False).logits[0, -1:]
