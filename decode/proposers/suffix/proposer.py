"""Drafts copied from the text and earlier ones, by how often each token followed what stands at the text's end.

Shape suffix: R occurrences of a match.
"""

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from torch import Tensor

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import DraftTask
from draftsmith.decode.proposers.copied import CopyProposer, Evidence, Found
from draftsmith.decode.proposers.suffix.index import Index, query
from draftsmith.decode.proposers.suffix.store import SuffixStore
from draftsmith.decode.rows import host_tokens
from draftsmith.decode.tree import ROOT, Tree

MOST = 1024
"""Occurrences that are looked at; of more, as many, evenly spaced."""


class SuffixProposer(CopyProposer):
    """Drafts what followed the longest match of the text's end, in the text itself or in earlier ones.

    SuffixDecoding (Oliaro et al. 2025, arXiv 2411.04975): a token's score is the product of frequencies on the path to
    it, each the share of the occurrences so far that go on with the token; of equally frequent tokens the latest wins.
    The draft's score, the sum over its tokens, says how many of them may be accepted. Of the text's own match and the
    store's, the one whose draft has the greater score is taken. The draft is deterministic.

    Args:
        min_match: the shortest match, in tokens.
        max_draft: the deepest draft; the draft length may be less.
        store: earlier texts; none if None.
        min_score: the least score of a token that is drafted.
        nodes: tokens of a tree at most, which has those of the greatest scores; chains if None.

    Raises:
        InputError: an option out of range, or in `start` a store of another vocabulary.
    """

    def __init__(
        self,
        min_match: int = 2,
        max_draft: int = 16,
        store: SuffixStore | None = None,
        min_score: float = 0.1,
        nodes: int | None = None,
    ):
        for name, value in (
            ("min_match", min_match),
            ("max_draft", max_draft),
            ("nodes", 1 if nodes is None else nodes),
        ):
            if value < 1:
                raise InputError(f"{name}: expected at least 1, found {value}")
        if not 0 < min_score <= 1:
            raise InputError(f"min_score: expected more than 0 and at most 1, found {min_score}")
        self.min_match, self.max_draft, self.store = min_match, max_draft, store
        self.min_score, self.most_nodes = min_score, nodes

    def start(self, task: DraftTask) -> int:
        """Begin with new texts."""
        if self.store is not None and self.store.vocab_size > task.vocab_size:
            raise InputError(
                f"store: expected at most the target's {task.vocab_size} tokens, found {self.store.vocab_size}"
            )
        self._rows = [Index(task.max_length) for _ in task.generators]
        return self.nodes(task.draft_length)

    def nodes(self, draft_length: int) -> int:
        """Return the tokens of a draft at most."""
        depth = min(draft_length, self.max_draft)
        return depth if self.most_nodes is None or not depth else self.most_nodes

    def select(self, rows: Sequence[int]) -> None:
        """Drop the other rows' texts."""
        self._rows = [self._rows[row] for row in rows]

    def find(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Found]:
        """Find a chain or a tree for each row, possibly an empty one."""
        rows = zip(self._rows, host_tokens(contexts), draft_lengths, strict=True)
        return [self._find(*args) for args in rows]

    def _find(self, own: Index, text: np.ndarray, draft_length: int) -> Found:
        own.extend(text[len(own) :])
        wanted, best, match, score = query(text), _Draft(), 0, 0.0
        for index in (own, *(() if self.store is None else self.store.indexes)):
            longest = index.longest(wanted)
            if longest is None or longest.length < self.min_match:
                continue
            # Whole drafts are compared, so that which of them it is depends on the text alone.
            draft = self._copied(index, index.occurrences(longest, MOST))
            if (found := sum(draft.scores)) > score:
                best, match, score = draft, longest.length, found
        tokens, tree = best.cut(draft_length)
        return Found(tokens, tree, Evidence(match, score, len(text)))

    def _copied(self, index: Index, places_R: np.ndarray) -> "_Draft":
        """Return the tokens of the greatest scores behind some places."""
        draft, most = _Draft(), self.max_draft if self.most_nodes is None else self.most_nodes
        # By score, then in the order in which they were found; what lies behind a node, once it is drafted.
        heap: list[tuple[float, int, int, int, np.ndarray, int]] = []
        count = 0

        def push(parent: int, depth: int, places_R: np.ndarray, score: float) -> None:
            nonlocal count
            following_R = index.following(places_R, depth)
            likely = Counter(following_R.tolist()).most_common(1 if self.most_nodes is None else None)
            for token, times in likely:
                if token and (its := score * times / len(places_R)) >= self.min_score:
                    count += 1
                    heappush(heap, (-its, count, token - 1, parent, places_R[following_R == token], depth + 1))

        push(ROOT, 0, places_R, 1.0)
        while heap and len(draft.tokens) < most:
            score, _, token, parent, places_R, depth = heappop(heap)
            draft.tokens.append(token)
            draft.parents.append(parent)
            draft.scores.append(-score)
            if depth < self.max_draft:
                push(len(draft.tokens) - 1, depth, places_R, -score)
        return draft


class _Draft:
    """What may be copied, node by node."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []

    def cut(self, depth: int) -> tuple[list[int], Tree]:
        """Return tokens and tree without what lies deeper."""
        if self.parents == list(range(ROOT, len(self.parents) - 1)):
            tokens = self.tokens[:depth]
            return tokens, Tree.chain(len(tokens))
        tree, nodes = Tree(tuple(self.parents)).pruned(depth)
        return [self.tokens[node] for node in nodes], tree
