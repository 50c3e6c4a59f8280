"""From logits to the law that tokens are drawn from: one function for target, draft and residual.

Shape suffixes: K positions, V vocabulary, T context tokens.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

# These look at the scores alone, so that all positions of a block can be warped in one call. Every other processor
# (penalties, bans, minimum length) may look at the tokens before its position, drafted ones included.
CONTEXT_FREE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


@dataclass(frozen=True)
class Law:
    """How logits become a distribution: the processors that `generate` prepared, then softmax, or argmax at T=0."""

    processors: LogitsProcessorList
    do_sample: bool

    @cached_property
    def context_free(self) -> bool:
        """Whether no processor looks at the tokens before its position."""
        return all(isinstance(p, CONTEXT_FREE) for p in self.processors)

    def scores(self, logits_KV: Tensor, context_T: Tensor) -> Tensor:
        """Return processed logits in at least float32.

        Args:
            logits_KV: logits of K consecutive positions, (K, V). They are never written to.
            context_T: the tokens up to and including the last position's own context, (T,): row j is conditioned on
                the first T − K + 1 + j of them.

        Returns:
            (K, V).
        """
        scores_KV = logits_KV if logits_KV.dtype in (torch.float32, torch.float64) else logits_KV.float()
        if not self.processors:
            return scores_KV
        process: Any = self.processors  # annotated for LongTensor, which no tensor's static type is
        if scores_KV is logits_KV:
            scores_KV = logits_KV.clone()
        if self.context_free:
            return process(context_T[None, :], scores_KV)
        first = len(context_T) - len(scores_KV) + 1
        rows = [process(context_T[None, : first + j], row[None, :]) for j, row in enumerate(scores_KV)]
        return torch.cat(rows)

    def probabilities(self, logits_KV: Tensor, context_T: Tensor) -> Tensor:
        """Return the distributions, (K, V); at T=0 they are one-hot on the argmax, not a sharpened softmax."""
        scores_KV = self.scores(logits_KV, context_T)
        if self.do_sample:
            return scores_KV.softmax(-1)
        return torch.nn.functional.one_hot(scores_KV.argmax(-1), scores_KV.shape[-1]).to(scores_KV.dtype)

    def choose(self, logits_KV: Tensor, context_T: Tensor) -> Tensor:
        """Return the argmax token of each position, (K,): the whole law at T=0."""
        return self.scores(logits_KV, context_T).argmax(-1)

    def next_token(self, logits_1V: Tensor, context_T: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return the token after the context, (1,) int64, drawn from the law of one position."""
        if self.do_sample:
            return draw(self.probabilities(logits_1V, context_T)[0], generator)
        return self.choose(logits_1V, context_T)


def draw(p_V: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw one token from a distribution (V,) or an unnormalised one; returns (1,) int64."""
    return torch.multinomial(p_V, 1, generator=generator)


def align_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut logits (…, V') to the target's V entries, or fill up with minus infinity: padding is never proposed."""
    if logits.shape[-1] < vocab_size:
        return torch.nn.functional.pad(logits, (0, vocab_size - logits.shape[-1]), value=float("-inf"))
    return logits[..., :vocab_size]
