"""Copied drafts: the drafters that copy, their matches in each text, and the texts that they learn."""

from collections.abc import Callable, Sequence

import numpy as np

from draftsmith.decode.proposers.copied import CopyProposer, Evidence, Finder
from draftsmith.decode.proposers.suffix.store import SuffixStore


class Copies:
    """Drafters that copy chains, in drafting order, and the switch that decides from evidence which draft to take.

    Ended texts go into the `stores`. `last_length` limits the model's drafts where nothing is copied.
    """

    def __init__(
        self, drafters: Sequence[CopyProposer], switch: Callable[[Evidence], bool],
        stores: Sequence[SuffixStore] = (), last_length: int | None = None,
    ):  # fmt: skip
        self._drafters, self._switch, self._stores = drafters, switch, stores
        self.last_length = last_length

    @property
    def learns(self) -> bool:
        """True if ended texts are added to a store."""
        return bool(self._stores)

    def of_text(self, room: int) -> "CopiesOfText":
        """Return a finder of copies in a text of at most `room` tokens."""
        return CopiesOfText([drafter.finder(room) for drafter in self._drafters], self._switch, room)

    def learn(self, tokens: Sequence[int]) -> None:
        """Add a text to the stores, split at tokens outside a store's vocabulary."""
        text = np.array(tokens, dtype=np.int64)
        for store in self._stores:
            outside = np.flatnonzero(text >= store.vocab_size)
            for piece in np.split(text, outside):
                if len(piece := piece[piece < store.vocab_size]):
                    store.add(piece)


class CopiesOfText:
    """Finds the copies for one growing text of at most `room` tokens, with a finder for each drafter."""

    def __init__(self, finders: Sequence[Finder], switch: Callable[[Evidence], bool], room: int):
        self.room, self._finders, self._switch = room, finders, switch
        self._tokens = np.empty(room, dtype=np.int64)
        self._length = 0

    def find(self, tokens: Sequence[int], draft_length: int) -> list[int]:
        """Return the first chain that the switch takes, or an empty one; the text has grown since the last call."""
        self._tokens[self._length : len(tokens)] = tokens[self._length :]
        self._length = len(tokens)
        for finder in self._finders:
            copied = finder(self._tokens[: self._length], draft_length)
            if self._switch(copied.evidence):
                return list(copied.tokens)
        return []
