"""Lookahead decoding: the target drafts for itself by Jacobi iteration (Fu et al. 2024, section 3).

"Break the Sequential Dependency of LLM Inference Using Lookahead Decoding". A window of W columns and N − 1 levels
holds guesses of future text. Each forward extends every column by the target's next token, and adds the column's N-gram
to a pool. The draft consists of pooled N-grams that begin with the text's last token. Window and draft form one token
tree, which is verified in one forward like any other, so the output stays the target's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draftsmith.decode.errors import at_least
from draftsmith.decode.proposers.base import DraftTask, Outcome, Proposal, Proposer
from draftsmith.decode.rows import host_tokens
from draftsmith.decode.tree import ROOT, Tree


class NgramPool:
    """N-grams by their first token, the latest first.

    At most `per_token` N-grams are kept for each of at most `tokens` first tokens; the least recently updated first
    token is dropped first.
    """

    def __init__(self, per_token: int, tokens: int = 4096):
        self.per_token, self.tokens = per_token, tokens
        self._continuations: dict[int, list[tuple[int, ...]]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Put an N-gram before the others with its first token."""
        first, rest = ngram[0], tuple(ngram[1:])
        # Popped and inserted again, so that the dict stays in the order of updates.
        earlier = self._continuations.pop(first, [])
        self._continuations[first] = [rest, *(other for other in earlier if other != rest)][: self.per_token]
        if len(self._continuations) > self.tokens:
            del self._continuations[next(iter(self._continuations))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Return the other N − 1 tokens of the N-grams that begin with `token`."""
        return self._continuations.get(token, [])


@dataclass
class _Window:
    """One row's pool, and the guesses that become its next N-grams."""

    pool: NgramPool
    levels: list[list[int]] = field(default_factory=list)  # N − 1 levels of W tokens, the oldest first
    ends: list[int | None] = field(default_factory=list)
    """The last node of each column in the present draft; None if the length limit cut it off."""
    pooled: int = 0  # the number of the text's tokens whose N-grams are in the pool


class LookaheadProposer(Proposer):
    """A proposer of N-grams that the target generated in earlier rounds, or that occur in the text.

    Column j of the window is a branch of the tree: the first j + 1 tokens of level 0, then its tokens of levels 1 to
    N − 2. For a draft length γ the window has W = γ − (N − 2) columns, and no branch is deeper than γ. If γ < N − 1,
    N is γ + 1. The draft is deterministic; branches with a common beginning share its nodes. At most G = `guesses`
    N-grams are drafted in a round (section 3.2), and pooled for each first token.
    """

    def __init__(self, ngram: int = 3, guesses: int = 4):
        at_least(2).check("ngram", ngram)
        at_least(1).check("guesses", guesses)
        self.ngram, self.guesses = ngram, guesses

    def start(self, task: DraftTask) -> int:
        """Begin with empty pools, and return the greatest number of nodes of window and guesses."""
        self._n = min(self.ngram, task.draft_length + 1)
        self._window = task.draft_length - (self._n - 2)
        self._rows = [_Window(NgramPool(self.guesses)) for _ in task.generators]
        return self.nodes(task.draft_length)

    def nodes(self, draft_length: int) -> int:
        """Return the number of nodes of window and guesses if no node is shared."""
        n = min(self.ngram, draft_length + 1)
        return (draft_length - (n - 2) + self.guesses) * (n - 1)

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft a tree for each row, with the guesses before the window."""
        texts = zip(self._rows, host_tokens(contexts), draft_lengths, strict=True)
        drafts = [self._tree(*args) for args in texts]
        return [Proposal(contexts[0].new_tensor(tokens), None, tree) for tokens, tree in drafts]

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Extend each column by the target's token after it, pool its N-gram, and drop its oldest token."""
        row_columns = [[(j, end) for j, end in enumerate(row.ends) if end is not None] for row in self._rows]
        next_tokens = [
            outcome.logits[[end + 1 for _, end in columns]].argmax(-1)
            for outcome, columns in zip(outcomes, row_columns, strict=True)
        ]
        remaining = torch.cat(next_tokens).tolist()  # one transfer for all rows
        for row, columns in zip(self._rows, row_columns, strict=True):
            new, remaining = remaining[: len(columns)], remaining[len(columns) :]
            # In reverse: columns near the text depend on fewer guesses, and the last N-gram added is tried first.
            for (j, _), token in reversed(list(zip(columns, new, strict=True))):
                ngram = [*(level[j] for level in row.levels), token]
                row.pool.add(ngram)
                for level, following in zip(row.levels, ngram[1:], strict=True):
                    level[j] = following

    def select(self, rows: Sequence[int]) -> None:
        """Drop all other rows' windows and pools."""
        self._rows = [self._rows[row] for row in rows]

    def _tree(self, row: _Window, text: np.ndarray, draft_length: int) -> tuple[list[int], Tree]:
        """Return the draft after a text, (T,), as the nodes' tokens and their shape."""
        n, window = self._n, self._window
        if not row.levels:
            # The paper begins with random tokens. The end of the prompt works as well, and needs no random numbers.
            recent = text[-window * (n - 1) :].tolist()
            cycled = [recent[i % len(recent)] for i in range(window * (n - 1))]
            row.levels = [cycled[i : i + window] for i in range(0, len(cycled), window)]
        new = text[max(0, row.pooled - n + 1) :].tolist()
        for i in range(len(new) - n + 1):
            row.pool.add(new[i : i + n])
        row.pooled = len(text)

        # A trie, which drafts a token once after each prefix: one-hot drafts are lossless only if siblings differ.
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
