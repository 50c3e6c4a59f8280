"""Match rows of a decoder's batch to known texts by their tokens: rows are moved, reused and not named.

A wrong answer would cost acceptance, never a token of the text: the target verifies what is drafted.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

Tokens = Any
"""A numpy array of a row's tokens, (T,); numpy itself is not needed here."""


class KnownText:
    """A text, as it was sent to the service."""

    def __init__(self, id_: int):
        self.id = id_
        self.sent = 0
        """Tokens that the service knows for certain."""
        self._tokens: Tokens = ()

    def __len__(self) -> int:
        return len(self._tokens)

    def begins(self, tokens: Tokens) -> bool:
        """Return whether this text is these tokens, or the beginning of them."""
        length = len(self)
        if not 0 < length <= len(tokens) or self._tokens[-1] != tokens[length - 1]:
            return False
        return bool((self._tokens == tokens[:length]).all())

    def become(self, tokens: Tokens) -> None:
        """Extend the text to these tokens, which begin with it."""
        self._tokens = tokens.copy()


class KnownTexts:
    """Finds for each row the text that it goes on with.

    Args:
        keep: texts that are remembered at most, those that rows have now and those that had ended.
    """

    def __init__(self, keep: int):
        self._keep, self._next = keep, 0
        self._known: OrderedDict[int, KnownText] = OrderedDict()  # those seen longest ago first
        self._of_row: dict[int, KnownText] = {}

    def find(self, rows: Sequence[tuple[int, Tokens]]) -> list[KnownText]:
        """Return the text of each row, by its number and tokens; a new one where none of the known begins it.

        First the text that the row had before, then the longest of those that no row goes on with: of a row that was
        moved, or of a conversation that had a turn before.
        """
        found: dict[int, KnownText] = {}
        for row, tokens in rows:
            before = self._of_row.get(row)
            if before is not None and before.id in self._known and before.begins(tokens):
                found[row] = before
        taken = {text.id for text in found.values()}
        for row, tokens in rows:
            if row in found:
                continue
            text = max(
                (text for text in self._known.values() if text.id not in taken and text.begins(tokens)),
                key=len,
                default=None,
            )
            if text is None:
                text = KnownText(self._next)
                self._next += 1
            found[row] = self._known[text.id] = text
            taken.add(text.id)
        for row, tokens in rows:
            found[row].become(tokens)
            self._known.move_to_end(found[row].id)
        self._of_row = found
        return [found[row] for row, _ in rows]

    def ended(self) -> list[int]:
        """Return the ids of texts that are remembered no longer, once, and forget them."""
        surplus: list[int] = []
        while len(self._known) > max(self._keep, len(self._of_row)):
            surplus.append(self._known.popitem(last=False)[0])
        return surplus
