"""Acceptance of fixed trees at T=0 from the ranks of a text's tokens among a drafter's logits.

A token is accepted if the path to it is in the tree and the node has a child for its rank. So the ranks of the true
tokens suffice to replay every chain and every fixed tree, with the decoder's exact counts.

Shape suffixes: N tokens of the text, K depths.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draftsmith.decode.counts import Counts
from draftsmith.decode.errors import InputError
from draftsmith.decode.sampling import argmax
from draftsmith.decode.tree import ROOT, Tree

NONE = torch.iinfo(torch.int16).max
"""The rank of a token that is not drafted, or beyond the inspected ranks: no tree is as wide."""
MOST_RANKS = 10


def ranks_of(scores: Tensor, tokens: Tensor, most: int, by_argmax: bool = False) -> Tensor:
    """Return the rank of each token, (…), among its scores, (…, V), int16: 0 is the greatest score.

    Ranks from `most` on, and those of scores of −∞, are `NONE`. `by_argmax` gives only rank 0, as `argmax` finds it.
    """
    if by_argmax:
        return torch.full_like(tokens, NONE, dtype=torch.int16).masked_fill(argmax(scores) == tokens, 0)
    # Ties are in the order of this `topk`, which need not be that of another k.
    top = scores.topk(min(most, scores.shape[-1]))
    matches = (top.indices == tokens[..., None]) & top.values.isfinite()
    ranks = matches.to(torch.int16).argmax(-1).to(torch.int16)
    return ranks.where(matches.any(-1), NONE)


@dataclass(frozen=True)
class TextRanks:
    """The ranks of one text's tokens among a drafter's logits, which give every fixed tree's acceptance at T=0."""

    ranks: np.ndarray
    """The rank of x_{s+i} at depth i + 1 of a round from s, (N, K) int16; `NONE` where nothing is drafted."""
    most: tuple[int, ...]  # the number of inspected ranks at each depth
    limit: int  # the length limit of the text; its last token is the target's own, so it is never drafted
    first: int = 1  # the first token at which a round drafts: 1 for heads on the target's states, 0 for a model

    def __len__(self) -> int:
        """Return N."""
        return len(self.ranks)

    @property
    def drafted(self) -> np.ndarray:
        """The mask of the tokens that are drafted from each start, (N, K) bool."""
        return drafted_mask(len(self), self.ranks.shape[1], self.limit, self.first)

    @property
    def agreement(self) -> Tensor:
        """1 where the drafter's first choice is the token, else 0, for each start that drafts, (≤ N,) float32."""
        return torch.from_numpy(self.ranks[:, 0] == 0).float()[torch.from_numpy(self.drafted[:, 0])]

    def up_to(self, tokens: int) -> "TextRanks":
        """Return the ranks padded to a number of tokens, the additional ones not drafted."""
        missing = ((0, tokens - len(self)), (0, 0))
        return replace(self, ranks=np.pad(self.ranks, missing, constant_values=NONE))

    def nodes(self, tree: Tree) -> np.ndarray:
        """Return the node that the text reaches at each depth, from each start, (N, depth); `ROOT` outside the tree."""
        if tree.depth > self.ranks.shape[1]:
            raise InputError(f"tree: expected a depth up to the {self.ranks.shape[1]} heads, found {tree.depth}")
        for depth, (width, most) in enumerate(zip(tree.widths, self.most, strict=False)):
            if width > most:
                raise InputError(
                    f"tree: expected at most {most} siblings at depth {depth + 1}, the ranks that were looked at, "
                    f"found {width}"
                )
        # Row n + 1 holds the children of node n by rank, padded with ROOT. All starts walk down together.
        table = np.full((len(tree) + 1, max(tree.widths, default=0) + 1), ROOT)
        for row, children in enumerate(tree.children):
            table[row, : len(children)] = children
        reached = np.full((len(self), tree.depth), ROOT)
        node, alive = np.full(len(self), ROOT), np.ones(len(self), dtype=bool)
        for depth in range(tree.depth):
            rank = np.minimum(self.ranks[:, depth], table.shape[1] - 1)
            node = np.where(alive, table[node + 1, rank], ROOT)
            alive = node != ROOT
            reached[:, depth] = node
        return reached

    def accepted(self, tree: Tree) -> np.ndarray:
        """Return the number of tokens that a round from each start accepts, (N,)."""
        return (self.nodes(tree) != ROOT).sum(1)

    def starts(self, tree: Tree) -> list[int]:
        """Return the starts of a decoder's rounds with this tree at T=0."""
        return _walk(self.accepted(tree))

    def rounds(self, tree: Tree) -> int:
        """Return the decoder's `num_drafts` at T=0."""
        return len(self.starts(tree))

    def counts(self, tree: Tree) -> Counts:
        """Return the decoder's counts at T=0, exact unless the forwards of replay and decoder round differently."""
        accepted, n = self.accepted(tree), len(self)
        counts = Counts()
        for start in _walk(accepted):
            emitted = min(int(accepted[start]) + 1, n - start)
            drafted, _ = tree.pruned(max(0, self.limit - start - 1) if start >= self.first else 0)
            counts += Counts.of_round(drafted, int(accepted[start]), emitted)
        return counts


def _walk(accepted: np.ndarray) -> list[int]:
    starts, start = [], 0
    steps = (accepted + 1).tolist()  # accepted tokens, and one of the target's
    while start < len(steps):
        starts.append(start)
        start += steps[start]
    return starts


def drafted_mask(tokens: int, depth: int, limit: int, first: int = 1) -> np.ndarray:
    """Return the mask of a text's tokens that are drafted, by start and offset, (N, K) bool: see `TextRanks`."""
    start, offset = np.arange(tokens)[:, None], np.arange(depth)[None, :]
    return (start >= first) & (start + offset < min(tokens, limit - 1))
