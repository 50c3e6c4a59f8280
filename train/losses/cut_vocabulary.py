"""Training with a cut vocabulary: its tokens, and what a loss compares among them.

Terms that are acceptance, or weigh by it, take p as decoding does, with all that the draft can't propose; in the others
p is renormalised over these tokens, for they would be infinite. A position whose text has another token is no example
for it. Shape suffixes: N positions, V vocabulary, D its tokens.
"""

import torch
from torch import Tensor

from draftsmith.train.losses.chunk_sizes import ChunkSizes
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
    """Return a head's rows for all tokens, (V, …), of those for D tokens, (D, …): the others are the mean of these.

    Its logit is the mean of theirs, so that it is never the largest: for readers that know whole heads alone, and draft
    the most likely token.
    """
    mean = rows_D.mean(0, dtype=torch.float64).to(rows_D.dtype)
    rows_V = mean.expand(vocab_size, *rows_D.shape[1:]).clone()
    rows_V[tokens_D] = rows_D
    return rows_V


class CutVocabulary:
    """The D tokens of a draft or of drafting heads among the V of their target.

    Args:
        tokens_D: ids, int64, each once.
        vocab_size: V.
    """

    def __init__(self, tokens_D: Tensor, vocab_size: int):
        self.tokens_D, self.vocab_size = tokens_D, vocab_size
        self.places_V = torch.full((vocab_size,), len(tokens_D), device=tokens_D.device)
        """For each of V its place among the D, or D where it has none."""
        self.places_V[tokens_D] = torch.arange(len(tokens_D), device=tokens_D.device)

    def of_head(self, head: OutputHead) -> OutputHead:
        """Return the D rows of a head, a copy whose gradients are those of the whole."""
        return head.of(self.tokens_D.to(head.weight.device))

    def labels(self, labels_N: Tensor) -> Tensor:
        """Return the places of the text's tokens, −100 for one that has none: it can't be drafted, nor learned."""
        places_N = self.places_V[labels_N]
        return places_N.masked_fill(places_N == len(self.tokens_D), IGNORED)

    def of_cached(self, p: CachedDistributions) -> CachedDistributions:
        """Return cached distributions over the D tokens."""
        return p.among(self.places_V, len(self.tokens_D))

    def of_distributions(self, p: Tensor | CachedDistributions) -> WholeLogits | CachedDistributions:
        """Return what an objective is given for p, logits (N, V) or cached distributions."""
        return self.of_cached(p) if isinstance(p, CachedDistributions) else WholeLogits(p, self.tokens_D)

    def teacher_head(self, head: OutputHead, objective: Objective) -> OutputHead:
        """Return what an objective needs of the target's head: the D rows alone, if it can do without the others."""
        return head if objective.looks_outside else self.of_head(head)

    def of_teacher(self, p: LiveDistributions, objective: Objective) -> LiveDistributions | WholeDistributions:
        """Return the distributions that an objective compares with, of those that `teacher_head` makes."""
        return WholeDistributions(p, self.tokens_D) if objective.looks_outside else p

    def training_sizes(self, sizes: ChunkSizes, objective: Objective) -> ChunkSizes:
        """Return the chunks that a loss is taken in."""
        return self.sizes(sizes) if objective.looks_outside else sizes

    def widened(self, logits_ND: Tensor) -> Tensor:
        """Return logits over all tokens, (N, V), −∞ for those that can't be drafted."""
        nothing = logits_ND.new_full((len(logits_ND), self.vocab_size), -torch.inf)
        return nothing.index_copy(1, self.tokens_D, logits_ND)

    def sizes(self, sizes: ChunkSizes) -> ChunkSizes:
        """Return chunks for a head of D logits beside which all V are held: V ÷ D times fewer positions."""
        share = len(self.tokens_D) / self.vocab_size
        return ChunkSizes(max(1, int(sizes.chunk * share)), max(1, int(sizes.part * share)))
