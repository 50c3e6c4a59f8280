"""Which request a row of vLLM's batch is: rows move, end, and are taken by others, and only tokens tell."""

import random

import numpy as np

from draftsmith.scripts.services.row_texts import KnownTexts


def rows(*texts: list[int]) -> list[tuple[int, np.ndarray]]:
    return [(row, np.array(text, dtype=np.int32)) for row, text in enumerate(texts)]


def ids(found) -> list[int]:
    return [text.id for text in found]


def test_a_row_goes_on():
    texts = KnownTexts(8)
    first = ids(texts.find(rows([1, 2], [3])))
    assert first[0] != first[1] and ids(texts.find(rows([1, 2, 9], [3, 4, 5]))) == first


def test_rows_that_change_places_are_told_apart():
    texts = KnownTexts(8)
    a, b = ids(texts.find(rows([1, 2], [3, 4])))
    assert ids(texts.find(rows([3, 4, 5], [1, 2, 6]))) == [b, a]


def test_an_ended_row_s_place_is_another_text():
    texts = KnownTexts(8)
    a, b = ids(texts.find(rows([1, 2, 3], [4, 5])))
    again = ids(texts.find(rows([1, 2, 4], [4, 5, 6])))
    assert again[0] not in (a, b) and again[1] == b
    assert ids(texts.find([(5, np.array([1, 2, 3, 7]))])) == [a]  # a conversation goes on with its next turn


def test_equal_texts_are_two():
    texts = KnownTexts(8)
    found = ids(texts.find(rows([1, 2], [1, 2])))
    assert len(set(found)) == 2 and set(ids(texts.find(rows([1, 2, 3], [1, 2, 3])))) == set(found)


def test_the_longest_beginning_is_taken():
    texts = KnownTexts(8)
    _, longer = ids(texts.find(rows([1], [1, 2, 3])))
    assert ids(texts.find([(7, np.array([1, 2, 3, 4]))])) == [longer]


def test_only_so_many_are_remembered_but_all_of_the_batch():
    texts = KnownTexts(2)
    first = ids(texts.find(rows([1], [2], [3])))
    assert texts.ended() == []
    second = ids(texts.find(rows([4])))
    assert texts.ended() == first[:2] and texts.ended() == []
    assert ids(texts.find(rows([3, 1], [4, 1]))) == [first[2], *second]


def test_random_batches():
    """Texts whose tokens all differ, in rows that are shuffled each round: always the text that it is."""
    rng = random.Random(0)
    texts, running, of, fresh = KnownTexts(4), {}, {}, iter(range(10**6))
    for _ in range(200):
        for key in [key for key in running if rng.random() < 0.1]:
            del running[key]
        while len(running) < 6 and (not running or rng.random() < 0.5):
            running[next(fresh)] = [next(fresh) for _ in range(rng.randint(1, 5))]
        order = rng.sample(sorted(running), len(running))
        for key in order:
            running[key] += [next(fresh) for _ in range(rng.randint(1, 4))]
        for key, found in zip(order, texts.find(rows(*[running[key] for key in order])), strict=True):
            assert of.setdefault(key, found.id) == found.id
        texts.ended()
    assert len(set(of.values())) == len(of)


def test_what_is_told_is_a_copy():
    texts, tokens = KnownTexts(8), np.array([1, 2, 0, 0])
    (text,) = texts.find([(0, tokens[:2])])
    tokens[:2] = 9  # the engine's batch is written in place
    assert texts.find([(0, np.array([1, 2, 3]))]) == [text]
