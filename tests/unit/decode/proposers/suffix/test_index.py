"""The index against a naive search, on texts that repeat themselves."""

import numpy as np
import pytest

from draftsmith.decode.proposers.suffix.index import DEPTH, Index, places_in_order, query


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
        found = index.occurrences(match, 10**6)
        assert found.tolist() == places[::-1]
        assert (index.following(found, 0) - 1).tolist() == [so_far[place] for place in places[::-1]]


def test_a_match_is_counted_up_to_a_depth():
    index = Index(300)
    index.extend(np.zeros(200, dtype=np.int64))
    match = index.longest(query(np.zeros(200, dtype=np.int64)))
    assert match.length == DEPTH
    assert len(match) == 200 - DEPTH


def test_what_a_text_ends_with_has_no_next_token():
    index = Index(10)
    index.extend(np.array([4, 5, 4]))
    places = index.occurrences(index.longest(query(np.array([4]))), 10)
    assert index.following(places, 0).tolist() == [6]
    assert index.following(places, 1).tolist() == [5]
    assert index.following(places, 2).tolist() == [0]


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
    assert index.following(index.occurrences(match, 10), 0).tolist() == [0]


def test_of_many_occurrences_some_are_looked_at():
    index = Index(2000)
    index.extend(np.tile([7, 8], 1000))
    places = index.occurrences(index.longest(query(np.array([9, 7]))), 100)
    assert 90 <= len(places) <= 100
    assert places[0] > places[-1]


@pytest.mark.parametrize("seed", range(5))
def test_sorting_all_places_is_putting_each_into_its_place(seed):
    text = np.random.default_rng(seed).integers(0, 3, 300)
    once, one_by_one = Index(300), Index(300)
    once.extend(text)
    for token in text:
        one_by_one.extend(np.array([token]))
    assert [once._before(p) for p in once.order] == [one_by_one._before(p) for p in one_by_one.order]
    assert sorted(once.order) == sorted(one_by_one.order) == list(range(1, 300))


def test_nothing_has_no_places():
    assert list(places_in_order(np.zeros(0, dtype=">u4"))) == []
    assert Index(0, b"").longest(query(np.array([1]))) is None
