"""Drafts copied from the text and earlier ones, by how often each token followed what stands at the text's end."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from heapq import heappop, heappush

import numpy as np
from torch import Tensor

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import DraftTask
from draftsmith.decode.proposers.copied import CopyProposer, Evidence, Finder, Found
from draftsmith.decode.proposers.suffix.index import Index
from draftsmith.decode.proposers.suffix.store import SuffixStore
from draftsmith.decode.replay.batch_replay import BatchReplay
from draftsmith.decode.replay.texts import WrittenText
from draftsmith.decode.tree import ROOT, Tree

MOST = 64
"""Occurrences that are looked at, at most; of more at least half as many, evenly spaced in the index's order."""


class SuffixProposer(CopyProposer):
    """Drafts what followed the longest match of the text's end, in the text itself or in earlier ones.

    SuffixDecoding (Oliaro et al. 2025, arXiv 2411.04975): a token's score is the product of frequencies on the path to
    it, each the share of the occurrences so far that go on with the token; of equally frequent tokens the latest wins.
    Of a match that occurs very often a part of the occurrences is counted. The draft's score, the sum over its tokens,
    says how many of them may be accepted. Of the text's own longest match and the store's the longer one is taken, of
    equal ones the text's. The draft is deterministic.

    Args:
        min_match: the shortest match, in tokens.
        max_draft: the deepest draft; the draft length may be less.
        store: earlier texts; none if None.
        min_score: the least score of a token that is drafted.
        nodes: tokens of a tree at most, which has those of the greatest scores; chains if None.

    Raises:
        InputError: an option out of range, or in `start` a store of another vocabulary.
    """

    nested = True

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
        self._check_store(task)
        return super().start(task)

    def replay(
        self, task: DraftTask, texts: Sequence[WrittenText], distributions: Sequence[Tensor] | None
    ) -> BatchReplay:
        """Replay certain drafts."""
        self._check_store(task)
        return super().replay(task, texts, distributions)

    def _check_store(self, task: DraftTask) -> None:
        if self.store is not None and self.store.vocab_size > task.vocab_size:
            raise InputError(
                f"store: expected at most the target's {task.vocab_size} tokens, found {self.store.vocab_size}"
            )

    def nodes(self, draft_length: int) -> int:
        """Return the tokens of a draft at most."""
        depth = min(draft_length, self.max_draft)
        return depth if self.most_nodes is None or not depth else self.most_nodes

    def finder(self, max_length: int) -> Finder:
        """Return what finds a chain or a tree behind one text, of which it keeps an index."""
        return partial(self._find, Index(max_length))

    def _find(self, own: Index, text: np.ndarray, draft_length: int) -> Found:
        own.extend(text[len(own) :])
        wanted, best, where = own.last(), None, own
        for index in (own, *(() if self.store is None else self.store.indexes)):
            match = index.longest(wanted)
            if match is not None and match.length > (self.min_match - 1 if best is None else best.length):
                best, where = match, index
        if best is None:
            return Found([], Tree.chain(0), Evidence(0, 0.0, len(text)))
        # The whole draft: what there is evidence for does not depend on the draft length.
        behind = where.following(best, MOST, self.max_draft)
        draft = self._chain(behind) if self.most_nodes is None else self._tree(behind, self.most_nodes)
        tokens, tree = draft.cut(draft_length)
        match_length = best.length if draft.tokens else 0
        return Found(tokens, tree, Evidence(match_length, sum(draft.scores), len(text)))

    def _chain(self, behind: list[list[int]]) -> "_Draft":
        """Return the most frequent tokens behind some places, each given those before it."""
        draft, score = _Draft(), 1.0
        for depth in range(self.max_draft):
            if len(behind) == 1:  # as most often
                (tokens,) = behind
                for place in range(depth, tokens.index(0) if 0 in tokens else len(tokens)):
                    draft.add(tokens[place] - 1, place - 1, score)
                break
            # Of equally frequent ones the first that is met, which is the latest.
            token, times = max(Counter(tokens[depth] for tokens in behind).items(), key=lambda item: item[1])
            score *= times / len(behind)
            if not token or score < self.min_score:
                break
            draft.add(token - 1, depth - 1, score)
            if times < len(behind):
                behind = [tokens for tokens in behind if tokens[depth] == token]
        return draft

    def _tree(self, behind: list[list[int]], most: int) -> "_Draft":
        """Return the tokens of the greatest scores behind some places."""
        draft = _Draft()
        # By score, then in the order in which they were found; what lies behind a node, once it is drafted.
        heap: list[tuple[float, int, int, int, list[list[int]], int]] = []
        count = 0

        def push(parent: int, depth: int, behind: list[list[int]], score: float) -> None:
            nonlocal count
            for token, times in Counter(tokens[depth] for tokens in behind).most_common():
                if token and (its := score * times / len(behind)) >= self.min_score:
                    count += 1
                    rest = [tokens for tokens in behind if tokens[depth] == token]
                    heappush(heap, (-its, count, token - 1, parent, rest, depth + 1))

        push(ROOT, 0, behind, 1.0)
        while heap and len(draft.tokens) < most:
            score, _, token, parent, behind, depth = heappop(heap)
            draft.add(token, parent, -score)
            if depth < self.max_draft:
                push(len(draft.tokens) - 1, depth, behind, -score)
        return draft


class _Draft:
    """What may be copied, node by node."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []

    def add(self, token: int, parent: int, score: float) -> None:
        """Draft a token behind a node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)

    def cut(self, depth: int) -> tuple[list[int], Tree]:
        """Return tokens and tree without what lies deeper."""
        if self.parents == list(range(ROOT, len(self.parents) - 1)):
            tokens = self.tokens[:depth]
            return tokens, Tree.chain(len(tokens))
        tree, nodes = Tree(tuple(self.parents)).pruned(depth)
        return [self.tokens[node] for node in nodes], tree
