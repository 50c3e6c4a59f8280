"""The rows of a batch: the text that each row writes, and the tensor that holds all texts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from draftsmith.decode.cache import Slots
from draftsmith.decode.cache.layers import READ_AT_ONCE
from draftsmith.decode.counts import Counts
from draftsmith.decode.errors import InputError
from draftsmith.decode.sampling import Sampler


@dataclass(frozen=True)
class Departure:
    """The distance of emitted tokens' distributions from the target's, summed over tokens; it adds up like counts."""

    total_variation: float = 0.0
    """Σ over tokens of TV(the token's distribution, p); at T=0 equal to `disagreements`."""
    disagreements: int = 0
    """At T=0 the tokens that are not the target's argmax; 0 under sampling."""
    num_tokens: int = 0

    def __add__(self, other: "Departure") -> "Departure":
        return Departure(
            self.total_variation + other.total_variation,
            self.disagreements + other.disagreements,
            self.num_tokens + other.num_tokens,
        )

    def mean_total_variation(self) -> float | None:
        """Return the mean TV per token; None without tokens."""
        return self.total_variation / self.num_tokens if self.num_tokens else None

    def argmax_disagreement(self) -> float | None:
        """Return the share of tokens that differ from the exact rule's at T=0; None without tokens."""
        return self.disagreements / self.num_tokens if self.num_tokens else None


@dataclass
class TextRow:
    """One text being written; `index` is its row in the batch."""

    index: int
    padding: int  # padding tokens that were removed from its prompt
    text: Tensor  # the buffer of the whole text, (max_length,); its first `length` tokens are written
    length: int
    sampler: Sampler
    eos: frozenset[int]
    criteria: StoppingCriteriaList  # the criteria, in addition to `eos`, that end the text
    generator: torch.Generator | None
    rounds: list[Counts] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)  # for drafters that take turns, the drafter of each round
    departure: Departure = field(default_factory=Departure)
    done: bool = False
    finish_reason: str = "length"
    """`stop` once a token or another criterion has ended the text, in the words of servers."""
    _on_host: np.ndarray | None = field(default=None, init=False)
    """The host's copy of `text`, from the first use of `tokens`."""

    @property
    def context(self) -> Tensor:
        """The tokens so far, (length,)."""
        return self.text[: self.length]

    @property
    def tokens(self) -> np.ndarray:
        """The tokens so far on the host, (length,): read from the device once, then kept up to date."""
        if self._on_host is None:
            self._on_host = np.empty(len(self.text), dtype=np.int64)
            self._on_host[: self.length] = self.context.tolist()
        return self._on_host[: self.length]

    @property
    def room(self) -> int:
        """Tokens that may still be written."""
        return len(self.text) - self.length

    def not_finite(self, accepted: int = 0) -> InputError:
        """Return the error for NaN in the target's logits, `accepted` drafted tokens after the text."""
        return InputError(
            f"target: expected finite logits, found NaN after {self.length + accepted} tokens of row {self.index}"
        )

    def advance(self, tokens: Sequence[int]) -> list[int]:
        """Add tokens to the text, up to the first that meets a criterion; return those that belong to it."""
        start = self.length
        if self._on_host is not None:
            self._on_host[start : start + len(tokens)] = tokens
        for i, token in enumerate(tokens, start=1):
            self.length = start + i
            criteria: Any = self.criteria  # annotated for LongTensor
            if token in self.eos or (criteria and bool(criteria(self.context[None], None).all())):
                self.finish_reason = "stop"
            self.done = self.room == 0 or self.finish_reason == "stop"
            if self.done:
                return list(tokens[:i])
        return list(tokens)


class RowTexts(list[Tensor]):
    """The texts of some rows, B of (T_b,), with the same tokens on the host."""

    def __init__(self, rows: Sequence[TextRow]):
        super().__init__(row.context for row in rows)
        self._rows = rows

    @property
    def tokens(self) -> list[np.ndarray]:
        """The tokens on the host, B of (T_b,) int64."""
        return [row.tokens for row in self._rows]


def host_tokens(texts: Sequence[Tensor]) -> list[np.ndarray]:
    """Return the tokens of texts on the host, B of (T_b,) int64; `RowTexts` need no transfer for it."""
    return texts.tokens if isinstance(texts, RowTexts) else [text.cpu().numpy() for text in texts]


class TextBatch:
    """The texts of some rows in one tensor; each row's `text` becomes a view of it.

    A round writes at most `block` tokens to a row. `longest` is that of all texts ever written here; of `rows` if None.
    """

    def __init__(self, rows: Sequence[TextRow], block: int, longest: int | None = None):
        self.rows = list(rows)
        longest = longest or max(len(row.text) for row in rows)
        self._hold(rows[0].text.new_zeros(len(rows), longest + block))
        self._place(range(len(rows)))

    def _hold(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self._on_host = tokens.numpy() if tokens.device.type in READ_AT_ONCE else None  # shares the memory

    def _place(self, indices: Iterable[int]) -> None:
        """Copy the texts of some rows into the tensor, which holds them from now on."""
        for index in indices:
            row, tokens = self.rows[index], self._tokens[index]
            tokens[: row.length] = row.context
            row.text = tokens[: len(row.text)]
        self.lengths = Slots([row.length for row in self.rows], self._tokens.device)

    def refill(self, indices: Sequence[int], rows: Sequence[TextRow]) -> None:
        """Replace some ended rows by others; the ended texts get tensors of their own."""
        for index, row in zip(indices, rows, strict=True):
            self.rows[index].text = self.rows[index].context.clone()
            self.rows[index] = row
        self._place(indices)

    def last(self) -> Tensor:
        """Return each row's last token, (B, 1)."""
        if self.lengths.alike:
            return self._tokens.narrow(1, self.lengths.host[0] - 1, 1)
        return self._tokens.gather(1, self.lengths.tensor[:, None] - 1)

    def append(self, tokens_B: Tensor) -> None:
        """Write one token after each row, (B,)."""
        if self.lengths.alike:
            self._tokens[:, self.lengths.host[0]] = tokens_B
        else:
            self._tokens.scatter_(1, self.lengths.tensor[:, None], tokens_B[:, None])
        self.lengths = self.lengths + 1

    def write(self, tokens: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> Tensor | None:
        """Write tokens after each row; return the indices of accepted nodes in its block, (B, D), in one transfer.

        Short paths continue as a chain. `paths` is empty, and the result None, where all nodes are in order already.
        """
        lengths = [row.length + len(new) for row, new in zip(self.rows, tokens, strict=True)]
        depth = max(map(len, paths), default=0)
        chained = [[*path, *range(len(path) + 1, depth + 1)] for path in paths]
        if self._on_host is not None:
            for text, length, new in zip(self._on_host, lengths, tokens, strict=True):
                text[length - len(new) : length] = new
            self.lengths = Slots(lengths, self._tokens.device)
            return torch.tensor(chained) if paths else None
        # One transfer for all: each row's new length, its tokens, padded, and its path. The padding is overwritten.
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
        self.lengths = Slots(lengths, packet.device, packet[:, 0])
        return packet[:, 1 + width :] if paths else None

    def select(self, indices: Sequence[int]) -> None:
        """Keep only some rows."""
        self.rows = [self.rows[index] for index in indices]
        self._hold(self._tokens[indices])
        for row, tokens in zip(self.rows, self._tokens, strict=True):
            row.text = tokens[: len(row.text)]
        self.lengths = Slots([row.length for row in self.rows], self._tokens.device)
