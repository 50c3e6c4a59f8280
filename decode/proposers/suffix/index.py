"""An index of tokens: all positions, sorted by the tokens before them, read backwards.

It is a suffix array of the reversed text: positions with equal last tokens are adjacent, so binary searches find the
longest match and its occurrences. Tokens are stored from the last to the first, as their ids plus one in 4 big-endian
bytes, so that a position's sort key is a slice of the bytes. 0 marks the end of a text.

Shape suffixes: N tokens, R occurrences.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

DEPTH = 32  # the number of tokens before a position that it is sorted by, hence the greatest match length
BYTES = 4  # the size of a token
WIDTH = BYTES * DEPTH
Bytes: TypeAlias = Any  # `bytes` or a `bytearray`, which compare with each other
STRIDE, SAMPLED = 256, 4 * BYTES  # a read-only index keeps the first SAMPLED bytes of every STRIDE-th position together
AT_ONCE = 8  # all positions are sorted anew when at least one token in AT_ONCE is new
LARGEST = 2**32 - 2  # the greatest token id


@dataclass(frozen=True)
class Match:
    """The positions that share the most last tokens with a text: `first` … `end` − 1 in the index's order."""

    length: int  # the number of shared tokens, at most `DEPTH`
    first: int
    end: int

    def __len__(self) -> int:
        """Return R, the number of occurrences."""
        return self.end - self.first


def to_bytes(tokens: np.ndarray) -> bytes:
    """Return tokens, (N,), in the format of an index, from the last to the first."""
    return (tokens[::-1].astype(np.uint32) + np.uint32(1)).astype(">u4").tobytes()


class Index:
    """A sorted index with room for a number of tokens; a read-only one if it begins with tokens and their order.

    `tokens` are bytes in the format of `to_bytes`, and `order` is the result of `sort_positions`.
    """

    def __init__(self, room: int, tokens: bytes | None = None, order: "array[int] | None" = None):
        # One slot more, which stays 0: no token follows the last one.
        self.room, self._slots = room, room + 1 if tokens is None else len(tokens) // BYTES
        self._bytes: Bytes = bytearray(BYTES * self._slots) if tokens is None else tokens
        self._all = np.frombuffer(self._bytes, dtype=">u4")  # shares memory with the bytes
        self._length = 0 if tokens is None else room
        self.order = array("i") if order is None else order  # the offset of each position's key in the bytes
        # A closure is faster than a method; it is called about twenty times a token.
        key_bytes = self._bytes
        self._key: Callable[[int], Any] = lambda at: key_bytes[at : at + WIDTH]
        # A search over millions of positions misses the cache at each step; the sample narrows it first.
        self._sample = [] if tokens is None else [tokens[at : at + SAMPLED] for at in self.order[::STRIDE]]

    def __len__(self) -> int:
        """Return N, the number of tokens, including the ends of texts."""
        return self._length

    @property
    def tokens(self) -> np.ndarray:
        """Token ids plus one, from the last to the first, (N,); 0 at the end of a text."""
        return self._all[self._slots - self._length :]

    @property
    def nbytes(self) -> int:
        """The bytes of tokens and positions; the sample of a read-only index takes about 3 % more."""
        return len(self._bytes) + self.order.itemsize * len(self.order)

    def extend(self, text: np.ndarray, sort: bool = True) -> None:
        """Append token ids, (N,); searches find them unless `sort` is false."""
        assert isinstance(self._bytes, bytearray)
        before, self._length = self._length, self._length + len(text)
        self._bytes[BYTES * (self._slots - self._length) : BYTES * (self._slots - before)] = to_bytes(text)
        if not sort:
            return
        # Inserting a position moves all later ones, so a large share of new tokens is sorted at once.
        if AT_ONCE * len(text) >= self._length:
            first = BYTES * (self._slots - self._length)
            self.order = array("i", (first + np.array(sort_positions(self.tokens), dtype=np.int32)).tobytes())
            return
        tokens, order, key = self._bytes, self.order, self._key
        for position in range(max(before, 1), self._length):
            at = BYTES * (self._slots - position)
            order.insert(bisect_left(order, tokens[at : at + WIDTH], key=key), at)

    def end_text(self) -> None:
        """End the present text; tokens appended later are another text."""
        self._length += 1

    def last(self) -> bytes:
        """Return the key of a search: the last `DEPTH` tokens in the format of `to_bytes`."""
        at = BYTES * (self._slots - self._length)
        return bytes(self._bytes[at : at + WIDTH])

    def longest(self, last: bytes) -> Match | None:
        """Return the longest match with a key that `last` gave; None if not even the last token occurs."""
        tokens, order, key = self._bytes, self.order, self._key
        low, high, sample = 0, len(order), self._sample
        if sample:
            begins = last[:SAMPLED]
            low = STRIDE * max(0, bisect_left(sample, begins) - 1)
            high = min(high, STRIDE * bisect_right(sample, begins))
        at = bisect_left(order, last, low, high, key=key)
        # The most similar positions are next to where the key would be inserted.
        sides = [_shared(last, tokens[near : near + WIDTH]) for near in order[max(0, at - 1) : at + 1]]
        length = max(sides, default=0)
        if not length:
            return None
        least = last[: BYTES * length]
        first, end = at, at
        if at and sides[0] == length:
            first = _edge(order, key, least, at, -1)
        if at < len(order) and sides[-1] == length:
            end = _edge(order, key, least + b"\xff" * BYTES, at, 1)
        return Match(length, first, end)

    def following(self, match: Match, most: int, depth: int) -> list[list[int]]:
        """Return the tokens after each position of a match, plus one, R lists of `depth`, the latest position first.

        If there are more than `most` positions, at least half of `most` are returned, evenly spaced. Entries after the
        0 at a text's end are undefined.
        """
        step = -(-len(match) // most)
        offsets = np.array(self.order[match.first : match.end : step], dtype=np.int64)
        offsets.sort()
        slots = offsets[:, None] // BYTES - 1 - np.arange(depth)
        # Clipped to the first slot, which is 0, as fewer than `depth` tokens may follow.
        return self._all.take(slots, mode="clip").tolist()  # type: ignore[no-any-return]


def sort_positions(tokens: np.ndarray) -> "array[int]":
    """Return the sorted key offsets of the positions 1 … N − 1 of an index's tokens, (N,).

    Prefix doubling (Larsson and Sadakane 2007): suffixes sorted by their first k tokens are sorted by 2k by the ranks
    of the suffixes that begin k tokens later.
    """
    count = len(tokens)
    padded = np.zeros(count + 2, dtype=np.int64)
    padded[:count] = np.unique(tokens, return_inverse=True)[1] + 1  # small numbers: three fit into 64 bits
    size = int(padded.max(initial=0)) + 1
    # Begin with the first three tokens, or with one in a large vocabulary.
    keys = (padded[:count] * size + padded[1 : count + 1]) * size + padded[2:]
    if size > 2**21:
        keys = padded[:count]
    sorted_tokens, order = 3 if size <= 2**21 else 1, np.argsort(keys)
    # The rank of a suffix is the first slot of its group, the suffixes with equal first tokens so far.
    slots = np.arange(count)
    ranks = np.empty(count + 1, dtype=np.int64)
    ranks[count] = -1
    ranks[order] = np.maximum.accumulate(np.where(np.diff(keys[order], prepend=-1) != 0, slots, 0))
    tied = slots
    while sorted_tokens < DEPTH:
        group = ranks[order[tied]]
        # A suffix alone in its group has its final slot.
        is_tied = np.bincount(group, minlength=count)[group] > 1
        tied = tied[is_tied]
        if not len(tied):
            break
        members, groups = order[tied], group[is_tied]
        keys = groups * (count + 1) + ranks[np.minimum(members + sorted_tokens, count)] + 1
        within = np.argsort(keys)
        members, keys = members[within], keys[within]
        order[tied] = members
        ranks[members] = np.maximum.accumulate(np.where(np.diff(keys, prepend=-1) != 0, tied, 0))
        sorted_tokens *= 2
    return array("i", (BYTES * order[order > 0]).astype(np.int32).tobytes())


def _shared(one: bytes, other: Bytes) -> int:
    """Return the number of equal tokens at the beginning of two keys."""
    width = min(len(one), len(other))
    differing = int.from_bytes(one[:width], "big") ^ int.from_bytes(other[:width], "big")
    return (width - (differing.bit_length() + 7) // 8) // BYTES


def _edge(order: Sequence[int], key: Callable[[int], Any], bound: bytes, start: int, direction: int) -> int:
    """Return the insertion point of `bound`, searched from `start` in steps that double, as matches are few."""
    step, low, high = 1, start, start
    if direction < 0:
        while low > 0 and key(order[low - 1]) >= bound:
            high, low, step = low - 1, max(0, low - step), 2 * step
    else:
        while high < len(order) and key(order[high]) < bound:
            low, high, step = high + 1, min(len(order), high + step), 2 * step
    return bisect_left(order, bound, low, high, key=key)
