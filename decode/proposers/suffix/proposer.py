"""SuffixDecoding: drafts copied from the text and earlier texts, by the frequencies of continuations."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from heapq import heappop, heappush

import numpy as np

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import DraftTask
from draftsmith.decode.proposers.copied import CopiedDraft, CopyProposer, Evidence, Finder
from draftsmith.decode.proposers.suffix.index import Index
from draftsmith.decode.proposers.suffix.store import SuffixStore
from draftsmith.decode.replay.batch_replay import BatchReplay
from draftsmith.decode.replay.texts import AtTokens, WrittenText
from draftsmith.decode.tree import ROOT, Tree

MOST = 64  # the greatest number of occurrences that are counted: see `Index.following`


class SuffixProposer(CopyProposer):
    """A proposer of continuations of the longest match with the text's end, in the text or in earlier ones.

    SuffixDecoding (Oliaro et al. 2025, arXiv 2411.04975). A token's score is the product of frequencies along its path,
    each the share of the occurrences that continue with the token; among equally frequent tokens the latest wins. The
    sum of the tokens' scores is the expected accepted length. Of the longest matches in the text and in the store the
    longer one is used, and the text's if they are equal. The draft is deterministic.

    `min_match` is the shortest match in tokens, `max_draft` the greatest depth of a draft, `min_score` the least score
    of a drafted token, and `nodes` the size of a tree of the greatest scores; None drafts chains.

    Raises:
        InputError: an option out of range; in `start`, a store with a larger vocabulary.
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
        self, task: DraftTask, texts: Sequence[WrittenText], distributions: Sequence[AtTokens] | None
    ) -> BatchReplay:
        """Replay as `CopyProposer` does."""
        self._check_store(task)
        return super().replay(task, texts, distributions)

    def _check_store(self, task: DraftTask) -> None:
        if self.store is not None and self.store.vocab_size > task.vocab_size:
            raise InputError(
                f"store: expected at most the target's {task.vocab_size} tokens, found {self.store.vocab_size}"
            )

    def nodes(self, draft_length: int) -> int:
        """Return the greatest number of tokens of a draft."""
        depth = min(draft_length, self.max_draft)
        return depth if self.most_nodes is None or not depth else self.most_nodes

    def finder(self, max_length: int) -> Finder:
        """Return a function that drafts for one text and keeps an index of it."""
        return partial(self._find, Index(max_length))

    def _find(self, own: Index, text: np.ndarray, draft_length: int) -> CopiedDraft:
        own.extend(text[len(own) :])
        key, best, best_index = own.last(), None, own
        for index in (own, *(() if self.store is None else self.store.indexes)):
            match = index.longest(key)
            if match is not None and match.length > (self.min_match - 1 if best is None else best.length):
                best, best_index = match, index
        if best is None:
            return CopiedDraft([], Tree.chain(0), Evidence(0, 0.0, len(text)))
        # Draft to full depth before cutting, so that the evidence does not depend on the draft length.
        following = best_index.following(best, MOST, self.max_draft)
        draft = self._chain(following) if self.most_nodes is None else self._tree(following, self.most_nodes)
        tokens, tree = draft.cut(draft_length)
        match_length = best.length if draft.tokens else 0
        return CopiedDraft(tokens, tree, Evidence(match_length, sum(draft.scores), len(text)))

    def _chain(self, following: list[list[int]]) -> "_Draft":
        draft, score = _Draft(), 1.0
        for depth in range(self.max_draft):
            if len(following) == 1:  # the usual case
                (tokens,) = following
                for position in range(depth, tokens.index(0) if 0 in tokens else len(tokens)):
                    draft.add(tokens[position] - 1, position - 1, score)
                break
            # `max` returns the first of equally frequent tokens, which is the latest.
            token, count = max(Counter(tokens[depth] for tokens in following).items(), key=lambda item: item[1])
            score *= count / len(following)
            if not token or score < self.min_score:  # token 0 is the end of a text
                break
            draft.add(token - 1, depth - 1, score)
            if count < len(following):
                following = [tokens for tokens in following if tokens[depth] == token]
        return draft

    def _tree(self, following: list[list[int]], most: int) -> "_Draft":
        draft = _Draft()
        # (−score, order of insertion, token, parent, continuations after it, their depth) of nodes not drafted yet.
        heap: list[tuple[float, int, int, int, list[list[int]], int]] = []
        pushed = 0

        def push(parent: int, depth: int, following: list[list[int]], score: float) -> None:
            nonlocal pushed
            for token, count in Counter(tokens[depth] for tokens in following).most_common():
                if token and (token_score := score * count / len(following)) >= self.min_score:
                    pushed += 1
                    rest = [tokens for tokens in following if tokens[depth] == token]
                    heappush(heap, (-token_score, pushed, token - 1, parent, rest, depth + 1))

        push(ROOT, 0, following, 1.0)
        while heap and len(draft.tokens) < most:
            score, _, token, parent, following, depth = heappop(heap)
            draft.add(token, parent, -score)
            if depth < self.max_draft:
                push(len(draft.tokens) - 1, depth, following, -score)
        return draft


class _Draft:
    """The nodes of a copied draft, with their scores."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []

    def add(self, token: int, parent: int, score: float) -> None:
        """Add a token as a child of a node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)

    def cut(self, depth: int) -> tuple[list[int], Tree]:
        """Return tokens and tree without the nodes deeper than `depth`."""
        if self.parents == list(range(ROOT, len(self.parents) - 1)):
            tokens = self.tokens[:depth]
            return tokens, Tree.chain(len(tokens))
        tree, nodes = Tree(tuple(self.parents)).pruned(depth)
        return [self.tokens[node] for node in nodes], tree
