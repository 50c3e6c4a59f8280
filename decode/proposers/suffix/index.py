"""An index of tokens: all places in the order of the tokens before them, read backwards.

It is a suffix array of the text read from its end, so the places whose last tokens are those of another text lie
together: two binary searches find the longest match and how often it occurs. Tokens are kept from the last to the
first, one more than their ids in 4 bytes, high byte first: a slice of the bytes behind a place is what it is sorted
by. 0 stands where no text is.

Shape suffixes: N tokens, R occurrences.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

DEPTH = 32
"""Tokens before a place that it is sorted by: longer matches count as so many."""
BYTES = 4
"""Of a token."""
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


def query(tokens: np.ndarray) -> bytes:
    """Return what places are compared with: the last tokens of a text, (N,)."""
    return written(tokens[-DEPTH:])


class Index:
    """Places in the order of what stands before them.

    Args:
        room: tokens that it may hold.
        tokens: what it begins with and nothing is added to, from the last to the first, as bytes; none if None.
        order: their places in order.
    """

    def __init__(self, room: int, tokens: bytes | None = None, order: "array[int] | None" = None):
        # One more, where nothing stands: a text's last token has no next.
        self.room, self._slots = room, room + 1 if tokens is None else len(tokens) // BYTES
        self._bytes: bytes | bytearray = bytearray(BYTES * self._slots) if tokens is None else tokens
        self._all = np.frombuffer(self._bytes, dtype=">u4")  # what is written is seen in it
        self._length = 0 if tokens is None else room
        self.order = array("i") if order is None else order

    def __len__(self) -> int:
        """Return N, the tokens that it holds, the ends of texts counted in."""
        return self._length

    @property
    def tokens(self) -> np.ndarray:
        """One more than the tokens that it holds, from the last to the first, (N,); 0 behind the end of a text."""
        return self._all[self._slots - self._length :]

    @property
    def nbytes(self) -> int:
        """The bytes of tokens and places."""
        return len(self._bytes) + self.order.itemsize * len(self.order)

    def extend(self, text: np.ndarray, sort: bool = True) -> None:
        """Put tokens, (N,) of ids, behind those that it holds; they are found from now on unless `sort` is false."""
        assert isinstance(self._bytes, bytearray)
        before, self._length = self._length, self._length + len(text)
        self._bytes[BYTES * (self._slots - self._length) : BYTES * (self._slots - before)] = written(text)
        if not sort:
            return
        if AT_ONCE * len(text) >= self._length:
            self.order = places_in_order(self.tokens)
            return
        for place in range(max(before, 1), self._length):
            self.order.insert(bisect_left(self.order, self._before(place), key=self._before), place)

    def end_text(self) -> None:
        """Let nothing follow what it holds: what is put behind it is another text."""
        self._length += 1

    def longest(self, wanted: bytes) -> Match | None:
        """Return the longest match with a `query`; None where not even the last token occurs."""
        order, before = self.order, self._before
        at = bisect_left(order, wanted, key=before)
        # What is most alike lies beside where it would be itself.
        sides = [_shared(wanted, before(order[place])) for place in (at - 1, at) if 0 <= place < len(order)]
        length = max(sides, default=0)
        if not length:
            return None
        low = wanted[: BYTES * length]
        first = _edge(order, before, low, at, -1)
        return Match(length, first, _edge(order, before, low + b"\xff" * BYTES, at, 1))

    def occurrences(self, match: Match, most: int) -> np.ndarray:
        """Return the places of a match, (R,) int64, the latest first; of more than `most` as many, evenly spaced."""
        step = -(-len(match) // most)
        places = np.array(self.order[match.first : match.end : step], dtype=np.int64)
        places.sort()
        return places[::-1]

    def following(self, places: np.ndarray, offset: int) -> np.ndarray:
        """Return one more than the tokens so far behind places, (R,) int64; 0 behind the end of a text.

        Places must not lie behind the end at a smaller offset.
        """
        return self._all[self._slots - 1 - offset - places].astype(np.int64)

    def _before(self, place: int) -> bytes | bytearray:
        """Return the tokens before a place, from the last one on."""
        at = BYTES * (self._slots - place)
        return self._bytes[at : at + BYTES * DEPTH]


def places_in_order(tokens: np.ndarray) -> "array[int]":
    """Return the places of a text behind which it goes on, 1 … N − 1, in the order of what stands before them.

    By doubling (Manber and Myers 1993): places that are in the order of their last k tokens come into the order of 2k
    by the pairs of their ranks, and those of the places k before.

    Args:
        tokens: as an index has them, from the last to the first, (N,).
    """
    count = len(tokens)
    if not count:
        return array("i")
    ranks = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1
    known = 1
    while known < DEPTH and ranks.max(initial=0) < count:
        pairs = ranks * (count + 1)
        pairs[: count - known] += ranks[known:]
        ranks = np.unique(pairs, return_inverse=True)[1].astype(np.int64) + 1
        known *= 2
    order = np.argsort(ranks, kind="stable")
    # Token i from the end stands before place N − i; behind the last place there is nothing.
    places = count - order[order > 0]
    return array("i", places.astype(np.int32).tobytes())


def _shared(one: bytes, other: bytes | bytearray) -> int:
    """Return how many tokens two lists of bytes begin with together."""
    width = min(len(one), len(other))
    differing = int.from_bytes(one[:width], "big") ^ int.from_bytes(other[:width], "big")
    return (width - (differing.bit_length() + 7) // 8) // BYTES


def _edge(
    order: Sequence[int], before: Callable[[int], bytes | bytearray], bound: bytes, start: int, direction: int
) -> int:
    """Return where in the order `bound` would be, looked for from `start` on in steps that double: matches are few."""
    step, low, high = 1, start, start
    if direction < 0:
        while low > 0 and before(order[low - 1]) >= bound:
            high, low, step = low - 1, max(0, low - step), 2 * step
    else:
        while high < len(order) and before(order[high]) < bound:
            low, high, step = high + 1, min(len(order), high + step), 2 * step
    return bisect_left(order, bound, low, high, key=before)
