"""Acceptance of fixed trees at T=0 from the ranks of a text's tokens among a drafter's logits.

A token is accepted where the path so far lies in the tree and its rank is one of the node's children: the ranks of the
true tokens alone replay every chain and every fixed tree, count for count as the decoder has them.

Shape suffixes: N tokens of the text, K depths.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draftsmith.decode.counts import Counts
from draftsmith.decode.errors import InputError
from draftsmith.decode.tree import ROOT, Tree

NONE = torch.iinfo(torch.int16).max
"""The rank of a token that is not drafted, or beyond the ranks that were looked at: no tree is as wide."""
MOST_RANKS = 10


def ranks_of(scores: Tensor, tokens: Tensor, most: int) -> Tensor:
    """Return the rank of each token among its scores, 0 for the greatest, `NONE` from `most` on or at −∞.

    Equal scores are in the order of `torch.topk(most)`, which need not be that of another k.

    Args:
        scores: (…, V).
        tokens: (…) int64.
        most: ranks to look at.

    Returns:
        (…) int16.
    """
    top = scores.topk(min(most, scores.shape[-1]))
    matches = (top.indices == tokens[..., None]) & top.values.isfinite()
    ranks = matches.to(torch.int16).argmax(-1).to(torch.int16)
    return ranks.where(matches.any(-1), NONE)


@dataclass(frozen=True)
class TextRanks:
    """The ranks of one text's tokens among a drafter's logits: acceptance of every fixed tree at T=0."""

    ranks: np.ndarray
    """Of x_{s+i} at depth i + 1 of a round from s, (N, K) int16; `NONE` where nothing is drafted."""
    most: tuple[int, ...]
    """For each depth, how many ranks were looked at."""
    limit: int
    """Tokens that the text might have had: a round drafts no token past the last but one of them."""
    first: int = 1
    """Rounds that start before this token draft nothing: 1 for heads on the target's states, 0 for a model."""

    def __len__(self) -> int:
        """Return N."""
        return len(self.ranks)

    @property
    def drafted(self) -> np.ndarray:
        """Which tokens of the text are drafted from each start, (N, K) bool."""
        return drafted_from(len(self), self.ranks.shape[1], self.limit, self.first)

    @property
    def agreement(self) -> Tensor:
        """Whether the drafter's first choice is the token, 1 or 0 for each start that drafts it, (≤ N,) float32."""
        return torch.from_numpy(self.ranks[:, 0] == 0).float()[torch.from_numpy(self.drafted[:, 0])]

    def up_to(self, tokens: int) -> "TextRanks":
        """Return the ranks of a number of tokens, those after the known ones not drafted."""
        missing = ((0, tokens - len(self)), (0, 0))
        return replace(self, ranks=np.pad(self.ranks, missing, constant_values=NONE))

    def nodes(self, tree: Tree) -> np.ndarray:
        """Return the node that the text reaches at each depth, from each start, (N, depth); `ROOT` once it has left.

        Raises:
            InputError: a tree deeper than the drafts, or wider than the ranks that were looked at.
        """
        if tree.depth > self.ranks.shape[1]:
            raise InputError(f"tree: expected a depth up to the {self.ranks.shape[1]} heads, found {tree.depth}")
        for depth, (width, most) in enumerate(zip(tree.widths, self.most, strict=False)):
            if width > most:
                raise InputError(
                    f"tree: expected at most {most} siblings at depth {depth + 1}, the ranks that were looked at, "
                    f"found {width}"
                )
        # Row n + 1 holds the children of node n, and ROOT where it has fewer.
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
        """Return how many tokens a round from each start accepts, (N,)."""
        return (self.nodes(tree) != ROOT).sum(1)

    def starts(self, tree: Tree) -> list[int]:
        """Return where the rounds of a decoder with this tree start, at T=0."""
        return _walk(self.accepted(tree))

    def rounds(self, tree: Tree) -> int:
        """Return the decoder's `num_drafts` at T=0."""
        return len(self.starts(tree))

    def counts(self, tree: Tree) -> Counts:
        """Return the decoder's counts at T=0, integer for integer (where both forwards round alike)."""
        accepted, n = self.accepted(tree), len(self)
        counts = Counts()
        for start in _walk(accepted):
            emitted = min(int(accepted[start]) + 1, n - start)
            drafted, _ = tree.pruned(max(0, self.limit - start - 1) if start >= self.first else 0)
            counts += Counts.of_round(drafted, int(accepted[start]), emitted)
        return counts


def _walk(accepted: np.ndarray) -> list[int]:
    starts, at = [], 0
    steps = (accepted + 1).tolist()
    while at < len(steps):
        starts.append(at)
        at += steps[at]
    return starts


def drafted_from(tokens: int, depth: int, limit: int, first: int = 1) -> np.ndarray:
    """Return which tokens of a text are drafted from each start, by offset, (N, K) bool: see `TextRanks`."""
    start, offset = np.arange(tokens)[:, None], np.arange(depth)[None, :]
    return (start >= first) & (start + offset < min(tokens, limit - 1))
