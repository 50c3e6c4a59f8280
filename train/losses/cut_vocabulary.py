"""Training with a cut vocabulary: its tokens, and the distributions that a loss compares over them.

Terms that are acceptance, or weighted by it, take p over all tokens, as decoding does. In the others p is renormalised
over the drafted tokens, since they would be infinite. A position whose text has another token is no example for them.
Shape suffixes: N positions, V vocabulary, D its drafted tokens.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.train.losses.chunked import ChunkSizes
from draftsmith.train.losses.distributions import (
    CachedDistributions,
    LiveDistributions,
    WholeDistributions,
    WholeLogits,
)
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead
from draftsmith.train.losses.positions import IGNORED


def whole_rows(rows_D: Tensor, tokens_D: Tensor, vocab_size: int) -> Tensor:
    """Return a head's rows for all V tokens, given those of D tokens; each missing row is the mean of the given ones.

    A missing token's logit is then the mean logit, and never the largest. This serves readers that know only whole
    heads and draft the most likely token.
    """
    mean = rows_D.mean(0, dtype=torch.float64).to(rows_D.dtype)
    rows_V = mean.expand(vocab_size, *rows_D.shape[1:]).clone()
    rows_V[tokens_D] = rows_D
    return rows_V


class CutVocabulary:
    """The D tokens (unique ids, int64) of a draft or of drafting heads, among the V of their target."""

    def __init__(self, tokens_D: Tensor, vocab_size: int):
        self.tokens_D, self.vocab_size = tokens_D, vocab_size
        self.indices_V = torch.full((vocab_size,), len(tokens_D), device=tokens_D.device)
        """Each token's index among the D, or D if it is not drafted."""
        self.indices_V[tokens_D] = torch.arange(len(tokens_D), device=tokens_D.device)

    def of_head(self, head: OutputHead) -> OutputHead:
        """Return the D rows of a head, a copy; gradients flow to the whole head."""
        return head.of(self.tokens_D.to(head.weight.device))

    def labels(self, labels_N: Tensor) -> Tensor:
        """Return the indices of the text's tokens among the D, −100 for tokens that cannot be drafted."""
        indices_N = self.indices_V[labels_N]
        return indices_N.masked_fill(indices_N == len(self.tokens_D), IGNORED)

    def of_cached(self, p: CachedDistributions) -> CachedDistributions:
        """Return cached distributions over the D tokens."""
        return p.among(self.indices_V, len(self.tokens_D))

    def of_distributions(self, p: Tensor | CachedDistributions) -> WholeLogits | CachedDistributions:
        """Return p as an objective takes it, from logits (N, V) or cached distributions."""
        return self.of_cached(p) if isinstance(p, CachedDistributions) else WholeLogits(p, self.tokens_D)

    def widened(self, logits_ND: Tensor) -> Tensor:
        """Return logits over all tokens, (N, V), −∞ for tokens that cannot be drafted."""
        nothing = logits_ND.new_full((len(logits_ND), self.vocab_size), -torch.inf)
        return nothing.index_copy(1, self.tokens_D, logits_ND)

    def sizes(self, sizes: ChunkSizes) -> ChunkSizes:
        """Return chunk sizes for a head of D logits when all V are held too: V ÷ D times fewer positions."""
        share = len(self.tokens_D) / self.vocab_size
        return ChunkSizes(max(1, int(sizes.chunk * share)), max(1, int(sizes.part * share)))


@dataclass(frozen=True)
class LossVocabulary:
    """The tokens over which a training loss compares p and q: all of them, or those of a cut vocabulary."""

    objective: Objective
    cut: CutVocabulary | None

    @classmethod
    def of(cls, objective: Objective, tokens_D: Tensor | None, vocab_size: int) -> "LossVocabulary":
        """Return the vocabulary of a drafter that proposes `tokens_D`, None for all, of its target's `vocab_size`."""
        cut = None if tokens_D is None else CutVocabulary(tokens_D, vocab_size)
        return cls(replace(objective, partial=cut is not None), cut)

    def labels(self, labels_N: Tensor) -> Tensor:
        """Return the text's tokens as indices of this vocabulary."""
        return labels_N if self.cut is None else self.cut.labels(labels_N)

    def teacher_head(self, head: OutputHead) -> OutputHead:
        """Return the rows of the target's head that the objective needs: all if it looks outside of the cut."""
        return head if self.cut is None or self.objective.looks_outside else self.cut.of_head(head)

    def distributions(
        self, p: LiveDistributions | CachedDistributions
    ) -> LiveDistributions | WholeDistributions | CachedDistributions:
        """Return p as the objective compares it; live distributions are made with `teacher_head`."""
        if self.cut is None:
            return p
        if isinstance(p, CachedDistributions):
            return self.cut.of_cached(p)
        return WholeDistributions(p, self.cut.tokens_D) if self.objective.looks_outside else p

    def sizes(self, sizes: ChunkSizes) -> ChunkSizes:
        """Return the chunk sizes of the loss."""
        return sizes if self.cut is None or not self.objective.looks_outside else self.cut.sizes(sizes)
