"""The rows of a batch: the text that each writes, and the tensor that holds all of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from draftsmith.decode.cache import Places
from draftsmith.decode.cache.layers import READ_AT_ONCE
from draftsmith.decode.counts import Counts
from draftsmith.decode.errors import InputError
from draftsmith.decode.sampling import Sampler


@dataclass(frozen=True)
class Departure:
    """How far the distributions of emitted tokens lie from the target's, summed over them; it adds up as counts do."""

    total_variation: float = 0.0
    """Σ over tokens of TV(the distribution that the token was emitted with, p); at T=0 equal to `disagreements`."""
    disagreements: int = 0
    """Tokens that are not the target's argmax although one of the exact rule at T=0 would be; 0 under sampling."""
    num_tokens: int = 0
    """Emitted tokens."""

    def __add__(self, other: "Departure") -> "Departure":
        return Departure(
            self.total_variation + other.total_variation,
            self.disagreements + other.disagreements,
            self.num_tokens + other.num_tokens,
        )

    def mean_total_variation(self) -> float | None:
        """Return the mean TV a token; None if none was emitted."""
        return self.total_variation / self.num_tokens if self.num_tokens else None

    def argmax_disagreement(self) -> float | None:
        """Return the share of tokens that differ from the exact rule's at T=0; None if none was emitted."""
        return self.disagreements / self.num_tokens if self.num_tokens else None


@dataclass
class TextRow:
    """One text being written."""

    index: int
    """Its place in the batch."""
    padding: int
    """Padding tokens that were taken away from its prompt."""
    text: Tensor
    """Room for the whole text, (max_length,), of which the first `length` tokens are written."""
    length: int
    sampler: Sampler
    """How its logits become the distribution that tokens are drawn from."""
    eos: frozenset[int]
    """Tokens that end the text."""
    criteria: StoppingCriteriaList
    """Further criteria that end it."""
    generator: torch.Generator | None
    rounds: list[Counts] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    """Of each round, which drafter of several that take turns drafted."""
    departure: Departure = field(default_factory=Departure)
    done: bool = False
    finish_reason: str = "length"
    """`stop` once a token or another criterion has ended the text, as servers say it."""
    _on_host: np.ndarray | None = field(default=None, init=False)
    """The same room as `text` on the host, from the first use of `tokens`."""

    @property
    def context(self) -> Tensor:
        """The tokens so far, (length,)."""
        return self.text[: self.length]

    @property
    def tokens(self) -> np.ndarray:
        """The tokens so far on the host, (length,): read from the device once, then updated as tokens are written."""
        if self._on_host is None:
            self._on_host = np.empty(len(self.text), dtype=np.int64)
            self._on_host[: self.length] = self.context.tolist()
        return self._on_host[: self.length]

    @property
    def room(self) -> int:
        """Tokens that may still be written."""
        return len(self.text) - self.length

    def not_finite(self, accepted: int = 0) -> InputError:
        """Return the error that the target's logits are not numbers, `accepted` drafted tokens behind the text."""
        return InputError(
            f"target: expected finite logits, found NaN after {self.length + accepted} tokens of row {self.index}"
        )

    def advance(self, tokens: Sequence[int]) -> list[int]:
        """Add tokens to the text, up to its end; return those that belong to it.

        The text ends with the first new token that meets any criterion.
        """
        start = self.length
        if self._on_host is not None:
            self._on_host[start : start + len(tokens)] = tokens
        for i, token in enumerate(tokens, start=1):
            self.length = start + i
            criteria: Any = self.criteria
            if token in self.eos or (criteria and bool(criteria(self.context[None], None).all())):
                self.finish_reason = "stop"
            self.done = self.room == 0 or self.finish_reason == "stop"
            if self.done:
                return list(tokens[:i])
        return list(tokens)


class RowTexts(list[Tensor]):
    """The texts of some rows, B of (T_b,), and the same tokens on the host.

    Args:
        rows: the rows.
    """

    def __init__(self, rows: Sequence[TextRow]):
        super().__init__(row.context for row in rows)
        self._rows = rows

    @property
    def tokens(self) -> list[np.ndarray]:
        """The tokens on the host, B of (T_b,) int64."""
        return [row.tokens for row in self._rows]


def host_tokens(texts: Sequence[Tensor]) -> list[np.ndarray]:
    """Return the tokens of texts on the host, B of (T_b,) int64: for `RowTexts` without a look at the device."""
    return texts.tokens if isinstance(texts, RowTexts) else [text.cpu().numpy() for text in texts]


class TextBatch:
    """The texts of some rows in one tensor, so that what a round writes goes to the device at once.

    Args:
        rows: texts to be written; each row's `text` becomes a view.
        block: tokens that one round writes to a row at most.
        longest: of all texts that are to be written here; of these rows if None.
    """

    def __init__(self, rows: Sequence[TextRow], block: int, longest: int | None = None):
        self.rows = list(rows)
        longest = longest or max(len(row.text) for row in rows)
        self._hold(rows[0].text.new_zeros(len(rows), longest + block))
        self._place(range(len(rows)))

    def _hold(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self._on_host = tokens.numpy() if tokens.device.type in READ_AT_ONCE else None

    def _place(self, places: Iterable[int]) -> None:
        """Write the texts of some rows so far into the tensor, which becomes their place."""
        for place in places:
            row, tokens = self.rows[place], self._tokens[place]
            tokens[: row.length] = row.context
            row.text = tokens[: len(row.text)]
        self.lengths = Places([row.length for row in self.rows], self._tokens.device)
        """The length of each row."""

    def refill(self, places: Sequence[int], rows: Sequence[TextRow]) -> None:
        """Put other rows in the places of some that have ended; the texts of those get tensors of their own."""
        for place, row in zip(places, rows, strict=True):
            self.rows[place].text = self.rows[place].context.clone()
            self.rows[place] = row
        self._place(places)

    def last(self) -> Tensor:
        """Return each row's last token, (B, 1)."""
        if self.lengths.alike:
            return self._tokens.narrow(1, self.lengths.host[0] - 1, 1)
        return self._tokens.gather(1, self.lengths.tensor[:, None] - 1)

    def append(self, tokens_B: Tensor) -> None:
        """Write one token behind each row, (B,)."""
        if self.lengths.alike:
            self._tokens[:, self.lengths.host[0]] = tokens_B
        else:
            self._tokens.scatter_(1, self.lengths.tensor[:, None], tokens_B[:, None])
        self.lengths = self.lengths + 1

    def write(self, tokens: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> Tensor | None:
        """Write tokens behind each row, in one transfer, which the places of the accepted nodes go with.

        Args:
            tokens: at most as many for each row as it has room for.
            paths: the places in its block of each row's accepted nodes; none where they are all in order.

        Returns:
            The same places, (B, D): where a path ends, those that a chain would have. None without paths.
        """
        lengths = [row.length + len(new) for row, new in zip(self.rows, tokens, strict=True)]
        depth = max(map(len, paths), default=0)
        chained = [[*path, *range(len(path) + 1, depth + 1)] for path in paths]
        if self._on_host is not None:
            for written, length, new in zip(self._on_host, lengths, tokens, strict=True):
                written[length - len(new) : length] = new
            self.lengths = Places(lengths, self._tokens.device)
            return torch.tensor(chained) if paths else None
        width = max(map(len, tokens))
        packet = torch.tensor(
            [
                [length, *new, *[0] * (width - len(new)), *path]
                for length, new, path in zip(lengths, tokens, chained or [[]] * len(tokens), strict=True)
            ],
            device=self._tokens.device,
        )
        if self.lengths.alike:
            self._tokens.narrow(1, self.lengths.host[0], width).copy_(packet[:, 1 : 1 + width])
        else:
            columns = self.lengths.tensor[:, None] + torch.arange(width, device=self._tokens.device)
            self._tokens.scatter_(1, columns, packet[:, 1 : 1 + width])
        self.lengths = Places(lengths, packet.device, packet[:, 0])
        return packet[:, 1 + width :] if paths else None

    def select(self, places: Sequence[int]) -> None:
        """Drop all but some rows."""
        self.rows = [self.rows[place] for place in places]
        self._hold(self._tokens[places])
        for row, tokens in zip(self.rows, self._tokens, strict=True):
            row.text = tokens[: len(row.text)]
        self.lengths = Places([row.length for row in self.rows], self._tokens.device)
