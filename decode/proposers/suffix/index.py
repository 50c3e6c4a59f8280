"""An index of tokens: all places in the order of the tokens before them, read backwards.

It is a suffix array of the text read from its end, so the places whose last tokens are those of another text lie
together: two binary searches find the longest match and how often it occurs. Tokens are kept from the last to the
first, one more than their ids in 4 bytes, high byte first: a slice of the bytes behind a place is what it is sorted
by. 0 stands where no text is.

Shape suffixes: N tokens, R occurrences.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

DEPTH = 32
"""Tokens before a place that it is sorted by: longer matches count as so many."""
BYTES = 4
"""Of a token."""
WIDTH = BYTES * DEPTH
Bytes: TypeAlias = Any
"""Of `bytes` or a `bytearray`, which compare with each other."""
STRIDE, SAMPLED = 256, 4 * BYTES
"""Of an index that does not change the first so many bytes of every so many places are kept together."""
AT_ONCE = 8
"""All places are sorted anew where at least one token in so many is new."""
LARGEST = 2**32 - 2
"""Of all token ids."""


@dataclass(frozen=True)
class Match:
    """The places of an index whose last tokens are those of a text, as many as any place shares with it."""

    length: int
    """Tokens that they share, `DEPTH` at most."""
    first: int
    """The first of these places in the index's order."""
    end: int
    """One more than the last of them."""

    def __len__(self) -> int:
        """Return R, how often the tokens occur."""
        return self.end - self.first


def written(tokens: np.ndarray) -> bytes:
    """Return tokens, (N,), as an index keeps them: from the last to the first."""
    return (tokens[::-1].astype(np.uint32) + np.uint32(1)).astype(">u4").tobytes()


class Index:
    """Places in the order of what stands before them.

    Args:
        room: tokens that it may hold.
        tokens: what it begins with and nothing is added to, from the last to the first, as bytes; none if None.
        order: as `in_order` gives it.
    """

    def __init__(self, room: int, tokens: bytes | None = None, order: "array[int] | None" = None):
        # One more, where nothing stands: a text's last token has no next.
        self.room, self._slots = room, room + 1 if tokens is None else len(tokens) // BYTES
        self._bytes: Bytes = bytearray(BYTES * self._slots) if tokens is None else tokens
        self._all = np.frombuffer(self._bytes, dtype=">u4")  # what is written is seen in it
        self._length = 0 if tokens is None else room
        self.order = array("i") if order is None else order
        """Of each place, where the bytes of what stands before it begin."""
        # A closure: it is called some twenty times a token.
        held = self._bytes
        self._key: Callable[[int], Any] = lambda at: held[at : at + WIDTH]
        # Of an index that does not change, every so many places' first bytes together: a search over millions of places
        # would wait for memory at each step.
        self._sample = [] if tokens is None else [tokens[at : at + SAMPLED] for at in self.order[::STRIDE]]

    def __len__(self) -> int:
        """Return N, the tokens that it holds, the ends of texts counted in."""
        return self._length

    @property
    def tokens(self) -> np.ndarray:
        """One more than the tokens that it holds, from the last to the first, (N,); 0 behind the end of a text."""
        return self._all[self._slots - self._length :]

    @property
    def nbytes(self) -> int:
        """The bytes of tokens and places; the sample of an index that does not change takes some 3 % more."""
        return len(self._bytes) + self.order.itemsize * len(self.order)

    def extend(self, text: np.ndarray, sort: bool = True) -> None:
        """Put tokens, (N,) of ids, behind those that it holds; they are found from now on unless `sort` is false."""
        assert isinstance(self._bytes, bytearray)
        before, self._length = self._length, self._length + len(text)
        self._bytes[BYTES * (self._slots - self._length) : BYTES * (self._slots - before)] = written(text)
        if not sort:
            return
        if AT_ONCE * len(text) >= self._length:
            first = BYTES * (self._slots - self._length)
            self.order = array("i", (first + np.array(in_order(self.tokens), dtype=np.int32)).tobytes())
            return
        tokens, order, key = self._bytes, self.order, self._key
        for place in range(max(before, 1), self._length):
            at = BYTES * (self._slots - place)
            order.insert(bisect_left(order, tokens[at : at + WIDTH], key=key), at)

    def end_text(self) -> None:
        """Let nothing follow what it holds: what is put behind it is another text."""
        self._length += 1

    def last(self) -> bytes:
        """Return what places are compared with: the last `DEPTH` tokens that it holds, as `written` has them."""
        at = BYTES * (self._slots - self._length)
        return bytes(self._bytes[at : at + WIDTH])

    def longest(self, wanted: bytes) -> Match | None:
        """Return the longest match with what `last` gives; None where not even the last token occurs."""
        tokens, order, key = self._bytes, self.order, self._key
        low, high, sample = 0, len(order), self._sample
        if sample:
            begins = wanted[:SAMPLED]
            low = STRIDE * max(0, bisect_left(sample, begins) - 1)
            high = min(high, STRIDE * bisect_right(sample, begins))
        at = bisect_left(order, wanted, low, high, key=key)
        # What is most alike lies beside where it would be itself.
        sides = [_shared(wanted, tokens[near : near + WIDTH]) for near in order[max(0, at - 1) : at + 1]]
        length = max(sides, default=0)
        if not length:
            return None
        least = wanted[: BYTES * length]
        first, end = at, at
        if at and sides[0] == length:
            first = _edge(order, key, least, at, -1)
        if at < len(order) and sides[-1] == length:
            end = _edge(order, key, least + b"\xff" * BYTES, at, 1)
        return Match(length, first, end)

    def following(self, match: Match, most: int, depth: int) -> list[list[int]]:
        """Return one more than the tokens behind the places of a match, R lists of `depth`, the latest place first.

        Of more than `most` places at least half as many, evenly spaced. Behind the end of a text stands a 0, and then
        anything.
        """
        step = -(-len(match) // most)
        offsets = np.array(self.order[match.first : match.end : step], dtype=np.int64)
        offsets.sort()
        slots = offsets[:, None] // BYTES - 1 - np.arange(depth)
        # Clipped: of a few tokens there may be fewer slots than `depth`, and in the first one nothing stands.
        return self._all.take(slots, mode="clip").tolist()  # type: ignore[no-any-return]


def in_order(tokens: np.ndarray) -> "array[int]":
    """Return where the bytes before each place begin, for the places 1 … N − 1, in the order of these bytes.

    By doubling (Larsson and Sadakane 2007): what is in the order of its first k tokens comes into the order of 2k by
    the ranks of what stands k further on; what differs from all others has its place already.

    Args:
        tokens: as an index has them, from the last to the first, (N,).
    """
    count = len(tokens)
    padded = np.zeros(count + 2, dtype=np.int64)
    padded[:count] = np.unique(tokens, return_inverse=True)[1] + 1  # small numbers: three fit into one of 64 bits
    size = int(padded.max(initial=0)) + 1
    keys = (padded[:count] * size + padded[1 : count + 1]) * size + padded[2:]
    if size > 2**21:
        keys = padded[:count]
    known, order = 3 if size <= 2**21 else 1, np.argsort(keys)
    # The rank of a token is the first slot of those that are alike so far.
    slots = np.arange(count)
    ranks = np.empty(count + 1, dtype=np.int64)
    ranks[count] = -1
    ranks[order] = np.maximum.accumulate(np.where(np.diff(keys[order], prepend=-1) != 0, slots, 0))
    alike = slots
    while known < DEPTH:
        behind = ranks[order[alike]]
        several = np.bincount(behind, minlength=count)[behind] > 1
        alike = alike[several]
        if not len(alike):
            break
        members, groups = order[alike], behind[several]
        keys = groups * (count + 1) + ranks[np.minimum(members + known, count)] + 1
        within = np.argsort(keys)
        members, keys, groups = members[within], keys[within], groups[within]
        order[alike] = members
        ranks[members] = np.maximum.accumulate(np.where(np.diff(keys, prepend=-1) != 0, alike, 0))
        known *= 2
    return array("i", (BYTES * order[order > 0]).astype(np.int32).tobytes())


def _shared(one: bytes, other: Bytes) -> int:
    """Return how many tokens two lists of bytes begin with together."""
    width = min(len(one), len(other))
    differing = int.from_bytes(one[:width], "big") ^ int.from_bytes(other[:width], "big")
    return (width - (differing.bit_length() + 7) // 8) // BYTES


def _edge(order: Sequence[int], before: Callable[[int], Any], bound: bytes, start: int, direction: int) -> int:
    """Return where in the order `bound` would be, looked for from `start` on in steps that double: matches are few."""
    step, low, high = 1, start, start
    if direction < 0:
        while low > 0 and before(order[low - 1]) >= bound:
            high, low, step = low - 1, max(0, low - step), 2 * step
    else:
        while high < len(order) and before(order[high]) < bound:
            low, high, step = high + 1, min(len(order), high + step), 2 * step
    return bisect_left(order, bound, low, high, key=before)
