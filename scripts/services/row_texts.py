"""Matching of a decoder's batch rows to known texts by their tokens, because rows are moved, reused and not named.

A wrong match costs acceptance but never changes the output: the target verifies every draft.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

Tokens = Any  # a numpy array of a row's tokens, (T,); numpy itself is not imported here


class KnownText:
    """A text as it was sent to the service."""

    def __init__(self, id_: int):
        self.id = id_
        self.sent = 0  # tokens that the service certainly has
        self._tokens: Tokens = ()

    def __len__(self) -> int:
        return len(self._tokens)

    def begins(self, tokens: Tokens) -> bool:
        """Return whether these tokens begin with this text."""
        length = len(self)
        if not 0 < length <= len(tokens) or self._tokens[-1] != tokens[length - 1]:
            return False
        return bool((self._tokens == tokens[:length]).all())

    def become(self, tokens: Tokens) -> None:
        """Extend the text to these tokens, which begin with it."""
        self._tokens = tokens.copy()


class KnownTexts:
    """Finds the text that each row continues; remembers up to `keep` texts, of present and ended rows."""

    def __init__(self, keep: int):
        self._keep, self._next = keep, 0
        self._known: OrderedDict[int, KnownText] = OrderedDict()  # least recently used first
        self._of_row: dict[int, KnownText] = {}

    def find(self, rows: Sequence[tuple[int, Tokens]]) -> list[KnownText]:
        """Return the text of each row, given by number and tokens; a new one if no known text begins it.

        A row keeps its previous text if that still fits. Otherwise it takes the longest fitting text that no row has:
        that of a moved row, or of the previous turn of a conversation.
        """
        text_of: dict[int, KnownText] = {}
        for row, tokens in rows:
            previous = self._of_row.get(row)
            if previous is not None and previous.id in self._known and previous.begins(tokens):
                text_of[row] = previous
        taken = {text.id for text in text_of.values()}
        for row, tokens in rows:
            if row in text_of:
                continue
            text = max(
                (text for text in self._known.values() if text.id not in taken and text.begins(tokens)),
                key=len,
                default=None,
            )
            if text is None:
                text = KnownText(self._next)
                self._next += 1
            text_of[row] = self._known[text.id] = text
            taken.add(text.id)
        for row, tokens in rows:
            text_of[row].become(tokens)
            self._known.move_to_end(text_of[row].id)
        self._of_row = text_of
        return [text_of[row] for row, _ in rows]

    def ended(self) -> list[int]:
        """Return the ids of texts that are no longer remembered, once, and forget them."""
        surplus: list[int] = []
        while len(self._known) > max(self._keep, len(self._of_row)):
            surplus.append(self._known.popitem(last=False)[0])
        return surplus
