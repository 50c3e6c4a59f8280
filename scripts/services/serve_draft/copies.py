"""Copied drafts of a draft service: the drafters that copy, what they find in each text, and texts that they learn."""

from collections.abc import Callable, Sequence

import numpy as np

from draftsmith.decode.proposers.copied import CopyProposer, Evidence, Finder
from draftsmith.decode.proposers.suffix.store import SuffixStore


class Copies:
    """Drafters that copy, and the switch that says where one of them drafts.

    Args:
        drafters: in the order in which they are looked at; of chains.
        switch: from evidence to whether the draft that it is of is taken.
        stores: where texts that have ended go, for drafts of others; none if empty.
        last_length: the longest draft of the model, where nothing is copied; as long as asked for if None.
    """

    def __init__(
        self,
        drafters: Sequence[CopyProposer],
        switch: Callable[[Evidence], bool],
        stores: Sequence[SuffixStore] = (),
        last_length: int | None = None,
    ):
        self._drafters, self._switch, self._stores = drafters, switch, stores
        self.last_length = last_length

    @property
    def learns(self) -> bool:
        """Whether texts that have ended are put into a store."""
        return bool(self._stores)

    def of_text(self, room: int) -> "CopiesOfText":
        """Return what finds copies behind a text as long as it has at most `room` tokens."""
        return CopiesOfText([drafter.finder(room) for drafter in self._drafters], self._switch, room)

    def learn(self, tokens: Sequence[int]) -> None:
        """Put a text into the stores, in pieces where it has tokens that are not in a store's vocabulary."""
        text = np.array(tokens, dtype=np.int64)
        for store in self._stores:
            outside = np.flatnonzero(text >= store.vocab_size)
            for piece in np.split(text, outside):
                if len(piece := piece[piece < store.vocab_size]):
                    store.add(piece)


class CopiesOfText:
    """What copying drafters find behind one text that grows.

    Args:
        finders: one of each drafter.
        switch: as of `Copies`.
        room: tokens of the text at most.
    """

    def __init__(self, finders: Sequence[Finder], switch: Callable[[Evidence], bool], room: int):
        self.room, self._finders, self._switch = room, finders, switch
        self._tokens = np.empty(room, dtype=np.int64)
        self._length = 0

    def find(self, tokens: Sequence[int], draft_length: int) -> list[int]:
        """Return the first chain that the switch takes; an empty one where it takes none.

        Args:
            tokens: the whole text, which begins with that of the call before.
            draft_length: tokens of the chain at most, at least 1.
        """
        self._tokens[self._length : len(tokens)] = tokens[self._length :]
        self._length = len(tokens)
        for finder in self._finders:
            found = finder(self._tokens[: self._length], draft_length)
            if self._switch(found.evidence):
                return list(found.tokens)
        return []
