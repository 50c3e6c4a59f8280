"""SuffixDecoding: drafts copied from the text and earlier texts, by the frequencies of continuations."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np

from draftsmith.decode.errors import InputError, at_least
from draftsmith.decode.proposers.base import DraftTask
from draftsmith.decode.proposers.copied import CopiedDraft, CopyProposer, Evidence, Finder
from draftsmith.decode.proposers.suffix.index import Index
from draftsmith.decode.proposers.suffix.store import SuffixStore
from draftsmith.decode.replay.batch_replay import BatchReplay
from draftsmith.decode.replay.texts import AtTokens, WrittenText

MOST = 64  # the greatest number of occurrences that are counted: see `Index.following`
LONGEST = 16  # the most tokens of a draft
LEAST_SCORE = 0.1  # of a drafted token


class SuffixProposer(CopyProposer):
    """A proposer of continuations of the longest match with the text's end, in the text or in earlier ones.

    SuffixDecoding (Oliaro et al. 2025, arXiv 2411.04975). A token's score is the product of frequencies along its path,
    each the share of the occurrences that continue with the token; among equally frequent tokens the latest wins. The
    sum of the tokens' scores is the expected accepted length. Of the longest matches in the text and in the store the
    longer one is used, and the text's if they are equal. The draft is deterministic.

    `min_match` is the shortest match in tokens.

    Raises:
        InputError: a match below 1; in `start`, a store with a larger vocabulary.
    """

    nested = True

    def __init__(self, min_match: int = 2, store: SuffixStore | None = None):
        at_least(1).check("min_match", min_match)
        self.min_match, self.store = min_match, store

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
        return min(draft_length, LONGEST)

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
            return CopiedDraft([], Evidence(0, 0.0, len(text)))
        # Draft to full depth before cutting, so that the evidence does not depend on the draft length.
        tokens, score = _most_frequent(best_index.following(best, MOST, LONGEST))
        return CopiedDraft(tokens[:draft_length], Evidence(best.length if tokens else 0, score, len(text)))


def _most_frequent(following: list[list[int]]) -> tuple[list[int], float]:
    """Return the tokens that most often follow, and the sum of their scores; `following` are as in `Index`."""
    drafted, scores, score = list[int](), list[float](), 1.0
    for depth in range(LONGEST):
        if len(following) == 1:  # the usual case
            (tokens,) = following
            rest = tokens[depth : tokens.index(0) if 0 in tokens else len(tokens)]
            return drafted + [token - 1 for token in rest], sum(scores + [score] * len(rest))
        # `max` returns the first of equally frequent tokens, which is the latest.
        token, count = max(Counter(tokens[depth] for tokens in following).items(), key=lambda item: item[1])
        score *= count / len(following)
        if not token or score < LEAST_SCORE:  # token 0 is the end of a text
            break
        drafted.append(token - 1)
        scores.append(score)
        if count < len(following):
            following = [tokens for tokens in following if tokens[depth] == token]
    return drafted, sum(scores)
