"""The index against a naive search, on texts that repeat themselves."""

import numpy as np
import pytest

from draftsmith.decode.proposers.suffix import index as index_module
from draftsmith.decode.proposers.suffix.index import BYTES, DEPTH, Index, sort_positions, to_bytes


def query(tokens):
    """What an index that holds these tokens looks for."""
    return to_bytes(tokens[-DEPTH:])


def searched(text, wanted):
    """The longest match of a text's end, by comparing all places: its length and the places behind it."""
    best, places = 0, []
    for place in range(1, len(text)):
        length = 0
        while length < min(place, len(wanted), DEPTH) and text[place - 1 - length] == wanted[-1 - length]:
            length += 1
        if length > best:
            best, places = length, []
        if length == best and length:
            places.append(place)
    return best, places


def places_of(index, match):
    return [len(index._all) - at // BYTES for at in index.order[match.first : match.end]]


@pytest.mark.parametrize("seed", range(40))
def test_the_longest_match_is_that_of_a_naive_search(seed):
    rng = np.random.default_rng(seed)
    text = rng.integers(0, rng.integers(1, 6), rng.integers(1, 120))
    index = Index(len(text))
    while len(index) < len(text):  # a prompt at once, rounds of a few tokens
        index.extend(text[len(index) : len(index) + rng.integers(1, 40 if not len(index) else 6)])
        so_far = text[: len(index)]
        match, (length, places) = index.longest(query(so_far)), searched(so_far, so_far)
        assert (match.length if match else 0) == length
        if match is None:
            continue
        assert sorted(places_of(index, match)) == places
        behind = index.following(match, 10**6, 2)
        assert [tokens[0] - 1 for tokens in behind] == [so_far[place] for place in places[::-1]]
        ends = [place + 1 == len(so_far) for place in places[::-1]]
        assert [tokens[1] == 0 for tokens in behind] == ends


def test_a_match_is_counted_up_to_a_depth():
    index = Index(300)
    index.extend(np.zeros(200, dtype=np.int64))
    match = index.longest(query(np.zeros(200, dtype=np.int64)))
    assert match.length == DEPTH
    assert len(match) == 200 - DEPTH


def test_no_match_reaches_from_one_text_into_the_next():
    index = Index(20)
    index.extend(np.array([1, 2, 3]))
    index.end_text()
    index.extend(np.array([4, 5]))
    index.end_text()
    match = index.longest(query(np.array([2, 3, 4])))
    assert match.length == 1  # 4 alone
    match = index.longest(query(np.array([2, 3])))
    assert match.length == 2
    assert index.following(match, 10, 1) == [[0]]


def test_of_many_occurrences_some_are_looked_at():
    index = Index(2000)
    index.extend(np.tile([7, 8], 1000))
    behind = index.following(index.longest(query(np.array([9, 7]))), 100, 1)
    assert 90 <= len(behind) <= 100


@pytest.mark.parametrize("seed", range(5))
def test_sorting_all_places_is_putting_each_into_its_place(seed):
    text = np.random.default_rng(seed).integers(0, 3, 300)
    once, one_by_one = Index(300), Index(300)
    once.extend(text)
    for token in text:
        one_by_one.extend(np.array([token]))
    assert [once._key(at) for at in once.order] == [one_by_one._key(at) for at in one_by_one.order]
    assert sorted(once.order) == sorted(one_by_one.order) == [BYTES * (301 - place) for place in range(299, 0, -1)]


@pytest.mark.parametrize("seed", range(8))
def test_a_sample_of_the_places_changes_nothing(seed, monkeypatch):
    monkeypatch.setattr(index_module, "STRIDE", 4)
    rng = np.random.default_rng(seed)
    text = rng.integers(0, rng.integers(1, 5), 400)
    grown = Index(400)
    grown.extend(text)
    fixed = Index(400, grown.tokens.tobytes(), sort_positions(grown.tokens))
    assert fixed._sample
    for _ in range(60):
        start = rng.integers(0, 390)
        wanted = query(np.concatenate([rng.integers(0, 6, 2), text[start : start + rng.integers(1, 40)]]))
        match, same = grown.longest(wanted), fixed.longest(wanted)
        assert (match is None) == (same is None)
        if match is not None:
            assert (match.length, match.first, match.end) == (same.length, same.first, same.end)
