"""Lookahead decoding: the target drafts for itself, by Jacobi iteration beside the text (Fu et al. 2024, section 3).

"Break the Sequential Dependency of LLM Inference Using Lookahead Decoding". A window of W columns and N − 1 levels
holds guesses of the text to come. Each forward extends every column by the target's next token; the N-gram that a
column then spells goes to a pool, and N-grams that begin with the text's last token are what is drafted. Window and
drafts are one token tree, verified in one forward as any other tree is, so that the output stays the target's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import DraftTask, Outcome, Proposal, Proposer
from draftsmith.decode.rows import host_tokens
from draftsmith.decode.tree import ROOT, Tree


class NgramPool:
    """N-grams by their first token, the latest first; those beyond the limits are dropped.

    Args:
        per_token: the most N-grams of one first token.
        tokens: the most first tokens; the one that was added to the longest ago is dropped first.
    """

    def __init__(self, per_token: int, tokens: int):
        self.per_token, self.tokens = per_token, tokens
        self._continuations: dict[int, list[tuple[int, ...]]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Put an N-gram before the others of its first token."""
        first, rest = ngram[0], tuple(ngram[1:])
        earlier = self._continuations.pop(first, [])
        self._continuations[first] = [rest, *(other for other in earlier if other != rest)][: self.per_token]
        if len(self._continuations) > self.tokens:
            del self._continuations[next(iter(self._continuations))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Return the remaining N − 1 tokens of the N-grams that begin with `token`."""
        return self._continuations.get(token, [])


@dataclass
class _Window:
    """One row's pool, and the guesses that become its next N-grams."""

    pool: NgramPool
    levels: list[list[int]] = field(default_factory=list)
    """N − 1 levels of W tokens, the oldest first."""
    ends: list[int | None] = field(default_factory=list)
    """The last node of each column in the present draft; None where the length limit cut it off."""
    seen: int = 0
    """Tokens of the text whose N-grams are in the pool."""


class LookaheadProposer(Proposer):
    """Drafts N-grams that the target made up in earlier rounds, or that stand in the text.

    Column j of the window is a branch of the tree: the first j + 1 tokens of level 0, then its tokens of levels 1 to
    N − 2. With a draft length γ the window is W = γ − (N − 2) columns wide, and no branch is deeper than γ. Where
    γ < N − 1, N is γ + 1. The draft is deterministic; branches that begin alike share nodes.

    Args:
        ngram: N, at least 2.
        guesses: G, N-grams drafted a round at most (section 3.2).
        pool_tokens: first tokens that a row's pool keeps N-grams of, G of them each.

    Raises:
        InputError: N < 2, or G or `pool_tokens` below 1.
    """

    def __init__(self, ngram: int = 3, guesses: int = 4, pool_tokens: int = 4096):
        for name, value, least in (("ngram", ngram, 2), ("guesses", guesses, 1), ("pool_tokens", pool_tokens, 1)):
            if value < least:
                raise InputError(f"{name}: expected at least {least}, found {value}")
        self.ngram, self.guesses, self.pool_tokens = ngram, guesses, pool_tokens

    def start(self, task: DraftTask) -> int:
        """Begin with empty pools. Return how many nodes window and guesses have at most."""
        self._n = min(self.ngram, task.draft_length + 1)
        self._window = task.draft_length - (self._n - 2)
        self._rows = [_Window(NgramPool(self.guesses, self.pool_tokens)) for _ in task.generators]
        return self.nodes(task.draft_length)

    def nodes(self, draft_length: int) -> int:
        """Return the nodes of window and guesses, were none shared."""
        n = min(self.ngram, draft_length + 1)
        return (draft_length - (n - 2) + self.guesses) * (n - 1)

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft a tree for each row: first the guesses, then the window."""
        texts = zip(self._rows, host_tokens(contexts), draft_lengths, strict=True)
        drafts = [self._tree(*args) for args in texts]
        return [Proposal(contexts[0].new_tensor(tokens), None, tree) for tokens, tree in drafts]

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Extend each column by the target's token after it, pool its N-gram, and drop its oldest token."""
        columns_of = [[(j, end) for j, end in enumerate(row.ends) if end is not None] for row in self._rows]
        chosen = [
            outcome.logits[[end + 1 for _, end in columns]].argmax(-1)
            for outcome, columns in zip(outcomes, columns_of, strict=True)
        ]
        after = torch.cat(chosen).tolist()  # in one transfer
        for row, columns in zip(self._rows, columns_of, strict=True):
            new, after = after[: len(columns)], after[len(columns) :]
            # Backwards: columns near the text are conditioned on fewer guesses, and the latest N-gram is tried first.
            for (j, _), token in reversed(list(zip(columns, new, strict=True))):
                ngram = [*(level[j] for level in row.levels), token]
                row.pool.add(ngram)
                for level, following in zip(row.levels, ngram[1:], strict=True):
                    level[j] = following

    def select(self, rows: Sequence[int]) -> None:
        """Drop the other rows' windows and pools."""
        self._rows = [self._rows[row] for row in rows]

    def _tree(self, row: _Window, text: np.ndarray, draft_length: int) -> tuple[list[int], Tree]:
        """Return what is drafted behind a text (T,): the nodes' tokens, and their shape."""
        n, window = self._n, self._window
        if not row.levels:
            # The paper begins with random tokens; the end of the prompt is as good and needs no randomness.
            recent = text[-window * (n - 1) :].tolist()
            cycled = [recent[i % len(recent)] for i in range(window * (n - 1))]
            row.levels = [cycled[i : i + window] for i in range(0, len(cycled), window)]
        unseen = text[max(0, row.seen - n + 1) :].tolist()
        for i in range(len(unseen) - n + 1):
            row.pool.add(unseen[i : i + n])
        row.seen = len(text)

        # A trie: a token is drafted once after each prefix, for one-hot drafts are lossless only if siblings differ.
        nodes: dict[tuple[int, int], int] = {}

        def insert(branch: Sequence[int]) -> int | None:
            node = ROOT
            for token in branch[:draft_length]:
                node = nodes.setdefault((node, token), len(nodes))
            return node if len(branch) <= draft_length else None

        for guess in row.pool.after(int(text[-1])):
            insert(guess)
        first, *others = row.levels
        row.ends = [insert([*first[: j + 1], *(level[j] for level in others)]) for j in range(window)]
        return [token for _, token in nodes], Tree(tuple(parent for parent, _ in nodes))
