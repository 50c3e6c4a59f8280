"""Drafts by frequency: hand-set texts, trees, scores, and the store."""

import numpy as np
import pytest
import torch

from draftsmith.decode import InputError, SuffixProposer, SuffixStore
from draftsmith.decode.proposers.base import DraftTask
from draftsmith.decode.proposers.copied import Evidence
from draftsmith.decode.sampling import Sampler


def started(proposer, rows=1, draft_length=8, vocab_size=100):
    task = DraftTask(Sampler.of(0), vocab_size, [None] * rows, 64, draft_length, True, False)
    proposer.start(task)
    return proposer


def found(proposer, *texts, draft_length=8):
    return proposer.find([torch.tensor(text) for text in texts], [draft_length] * len(texts))


def test_the_most_frequent_continuation_is_drafted():
    proposer = started(SuffixProposer(min_match=2))
    (draft,) = found(proposer, [1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 4, 7, 1, 2])
    # After 1 2: 4 twice of three, then 7 or 8 once each of two, the later one first; behind 7 stands what follows it.
    assert draft.tokens[:2] == [4, 7]
    assert draft.evidence.match == 2
    assert draft.evidence.score == pytest.approx(2 / 3 + 1 / 3 * len(draft.tokens[1:]), abs=1e-9)


def test_a_text_may_have_less_room_than_the_deepest_draft():
    proposer = SuffixProposer(1)
    proposer.start(DraftTask(Sampler.of(0), 100, [None], 5, 8, True, False))
    assert found(proposer, [1, 2, 1])[0].tokens == [2, 1]
    assert found(proposer, [1, 2, 1, 2, 1])[0].tokens == [2, 1]


def test_a_finder_finds_what_a_row_finds():
    proposer, text = started(SuffixProposer(1)), np.random.default_rng(3).integers(0, 4, 60)
    finder, other = proposer.finder(64), proposer.finder(64)
    for length in range(1, 61, 3):
        assert [finder(text[:length], 4)] == found(proposer, text[:length], draft_length=4)
    assert other(text, 4) == finder(text, 4)


def test_the_longest_match_wins_over_a_frequent_one():
    proposer = started(SuffixProposer())
    (draft,) = found(proposer, [5, 1, 2, 30, 6, 1, 2, 40, 7, 1, 2, 40, 5, 1, 2], draft_length=1)
    assert draft.tokens == [30]
    assert draft.evidence.match == 3


def test_nothing_is_drafted_without_a_match_that_is_long_enough():
    proposer = started(SuffixProposer(min_match=2))
    (draft,) = found(proposer, [1, 2, 3, 2])
    assert draft.tokens == []
    assert (draft.evidence.match, draft.evidence.score) == (0, 0.0)


def test_the_least_score_ends_a_draft():
    text = [token for last in range(2, 14) for token in (1, last)] + [1]  # each token after 1 has a twelfth
    assert found(started(SuffixProposer(min_match=1)), text)[0].tokens == []
    assert found(started(SuffixProposer(min_match=1)), text[6:], draft_length=1)[0].tokens == [13]


def test_a_shorter_draft_is_the_beginning_of_a_longer_one():
    text = np.random.default_rng(3).integers(0, 4, 60).tolist()
    drafts = [found(started(SuffixProposer(1)), text, draft_length=k)[0] for k in (0, 1, 2, 8)]
    assert len({draft.evidence for draft in drafts}) == 1
    assert [draft.tokens for draft in drafts] == [drafts[-1].tokens[:k] for k in (0, 1, 2, 8)]


def test_rows_have_their_own_texts_and_rows_that_end_are_dropped():
    proposer = started(SuffixProposer(min_match=1), rows=3)
    texts = [[1, 2, 1], [3, 4, 3], [5, 6, 5]]
    assert [draft.tokens[0] for draft in found(proposer, *texts)] == [2, 4, 6]
    proposer.select([0, 2])
    longer = [[1, 2, 1, 7, 1], [5, 6, 5, 8, 5]]
    # Of equally frequent tokens the latest.
    assert [draft.tokens[0] for draft in found(proposer, *longer)] == [7, 8]


def test_the_longer_match_is_taken_of_the_text_and_earlier_ones():
    store = SuffixStore(100)
    for _ in range(3):
        store.add([7, 8, 9, 10, 11, 12])
    proposer = started(SuffixProposer(min_match=2, store=store))
    (draft,) = found(proposer, [8, 20, 7, 8])
    assert draft.tokens == [9, 10, 11, 12]
    assert draft.evidence == Evidence(2, 4.0, 4)
    (draft,) = found(started(SuffixProposer(store=store)), [7, 8, 30, 31, 32, 33, 34, 35, 7, 8], draft_length=2)
    assert draft.tokens == [30, 31]


def test_a_store_of_a_larger_vocabulary_is_refused():
    proposer = SuffixProposer(store=SuffixStore(100))
    with pytest.raises(InputError, match="store: expected at most the target's 50 tokens, found 100"):
        started(proposer, vocab_size=50)
    with pytest.raises(InputError, match="store: expected at most the target's 50 tokens, found 100"):
        proposer.replay(DraftTask(Sampler.of(0), 50, [None], 64, 8, True, False), [], None)
