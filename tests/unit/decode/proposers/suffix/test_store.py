"""Stores of earlier texts: what they hold, what they drop, and files that are none."""

import numpy as np
import pytest

from draftsmith.decode import InputError, SuffixStore
from draftsmith.decode.proposers.suffix import store as module
from draftsmith.decode.proposers.suffix.index import to_bytes


def longest(store, tokens):
    matches = [index.longest(to_bytes(np.array(tokens))) for index in store.indexes]
    return max((match.length for match in matches if match), default=0)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(module, "FEWEST", 64)
    monkeypatch.setattr(module, "FRESH", 16)
    return lambda tokens: SuffixStore(100, tokens * module.PER_TOKEN)


def test_texts_are_found_before_and_after_they_are_sorted(small):
    store = small(200)
    for text in ([1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11, 12, 13], [14, 15, 16, 17]):
        store.add(text)
    assert len(store.indexes[0]) and len(store.indexes[1])
    for text in ([1, 2, 3], [5, 6], [8, 9, 10, 11, 12], [14, 15, 16]):
        assert longest(store, text) == len(text)
    assert longest(store, [99]) == 0


def test_the_oldest_texts_are_dropped(small):
    store, bytes_ = small(80), []
    for i in range(30):
        store.add([3 * i, 3 * i + 1, 3 * i + 2])
        bytes_.append(store.nbytes)
    assert max(bytes_) <= 80 * module.PER_TOKEN + 2 * 4  # the two ends where nothing stands
    assert longest(store, [87, 88]) == 2
    assert longest(store, [0, 1]) == 0


def test_of_a_text_longer_than_the_store_the_end_stays(small):
    store = small(80)
    store.add(np.arange(95) % 90)
    assert longest(store, [2, 3, 4]) == 3
    assert len(store) <= 80


def test_a_store_is_what_it_was_after_it_was_saved(tmp_path, small):
    store = small(200)
    for text in ([1, 2, 3, 4], [2, 3, 5]):
        store.add(text)
    store.save(tmp_path / "store.safetensors")
    loaded = SuffixStore.load(tmp_path / "store.safetensors", 100)
    assert longest(loaded, [1, 2, 3]) == 3
    assert sum(map(len, loaded.indexes)) == len(store) == 9
    assert [path.name for path in tmp_path.iterdir()] == ["store.safetensors"]


def test_a_smaller_store_takes_the_latest_texts(tmp_path, small):
    store = small(400)
    for i in range(30):
        store.add([3 * i, 3 * i + 1, 3 * i + 2])
    store.save(tmp_path / "store.safetensors")
    loaded = SuffixStore.load(tmp_path / "store.safetensors", 100, 80 * module.PER_TOKEN)
    assert longest(loaded, [87, 88]) == 2
    assert longest(loaded, [0, 1]) == 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SuffixStore(100, 100), "at least 32768 bytes and at most 4294967296, found 100"),
        (lambda: SuffixStore(0), "a vocabulary of 1 to"),
        (lambda: SuffixStore(100).add([3, -1]), "token ids from 0 to 99, found -1"),
        (lambda: SuffixStore(100).add([3, 100]), "token ids from 0 to 99, found 100"),
    ],
)
def test_what_a_store_cannot_hold_is_refused(make, said):
    with pytest.raises(InputError, match=f"store: expected {said}"):
        make()


def test_a_store_of_another_tokenizer_is_refused(tmp_path):
    store = SuffixStore(100, tokenizer="one")
    store.add([1, 2])
    store.save(tmp_path / "store")
    with pytest.raises(InputError, match="store: expected texts of the target's tokenizer"):
        SuffixStore.load(tmp_path / "store", 100, tokenizer="another")
    with pytest.raises(InputError, match=r"\(101 tokens\) in .*, found those of another \(100 tokens\)"):
        SuffixStore.load(tmp_path / "store", 101, tokenizer="one")


def test_a_store_that_is_cut_is_refused(tmp_path):
    store = SuffixStore(100)
    store.add(np.arange(90))
    store.save(tmp_path / "store")
    whole = (tmp_path / "store").read_bytes()
    for content in (whole[:-40], whole[:20], b"", b"tokens"):
        (tmp_path / "store").write_bytes(content)
        with pytest.raises(InputError, match=r"store: expected a store in .*store, found"):
            SuffixStore.load(tmp_path / "store", 100)
    with pytest.raises(InputError, match=r"store: expected a store in .*missing, found"):
        SuffixStore.load(tmp_path / "missing", 100)
