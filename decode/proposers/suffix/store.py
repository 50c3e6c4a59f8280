"""Earlier texts that drafts are copied from, in bounded memory."""

import os
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.suffix.index import BYTES, LARGEST, Index, in_order

PER_TOKEN = 2 * BYTES
"""Bytes: the token, and its place."""
FEWEST = 4096
"""Tokens that a store must have room for."""
MOST_BYTES = 1 << 32
"""Of a store: places are 32-bit numbers."""
FRESH = 1 << 16
"""Tokens of new texts that are put into their places one by one; then all are sorted."""


class SuffixStore:
    """Texts that were written before, such as a server's answers to other requests, for `SuffixProposer`.

    Most of them lie in one index. New ones go to a small one, some microseconds a token; when that is full all are
    sorted together, a second or so a million tokens, which whoever adds the text waits for. The oldest are dropped.

    Args:
        vocab_size: of the texts' tokenizer.
        most_bytes: 8 a token; while it sorts a store takes several times as much.
        tokenizer: what tells the texts' tokenizer from others of its size, such as a digest of its vocabulary.

    Raises:
        InputError: limits that hold nothing.
    """

    def __init__(self, vocab_size: int, most_bytes: int = 1 << 27, tokenizer: str = ""):
        if not 1 <= vocab_size <= LARGEST:
            raise InputError(f"store: expected a vocabulary of 1 to {LARGEST} tokens, found {vocab_size}")
        if not FEWEST * PER_TOKEN <= most_bytes <= MOST_BYTES:
            raise InputError(
                f"store: expected at least {FEWEST * PER_TOKEN} bytes and at most {MOST_BYTES}, found {most_bytes}"
            )
        self.vocab_size, self.most_bytes, self.tokenizer = vocab_size, most_bytes, tokenizer
        self._capacity = most_bytes // PER_TOKEN
        self._begin(b"", array("i"))

    @property
    def indexes(self) -> tuple[Index, Index]:
        """What is looked through: the older texts, and the latest."""
        return self._sorted, self._fresh

    @property
    def nbytes(self) -> int:
        """The bytes of tokens and places."""
        return self._sorted.nbytes + self._fresh.nbytes

    def __len__(self) -> int:
        """Return how many tokens it holds, the ends of texts counted in."""
        return len(self._sorted) + len(self._fresh)

    def add(self, tokens: Tensor | np.ndarray | Sequence[int]) -> None:
        """Add a text, (N,) of ids; of one that is longer than the store its end.

        Raises:
            InputError: a token that is not in the vocabulary.
        """
        text = np.asarray(tokens.cpu() if isinstance(tokens, Tensor) else tokens, dtype=np.int64)
        outside = text[(text < 0) | (text >= self.vocab_size)]
        if len(outside):
            raise InputError(f"store: expected token ids from 0 to {self.vocab_size - 1}, found {outside[0]}")
        if len(text) >= self._fresh.room:  # too long for the small index
            self._sort(text[-(self._capacity - 1) :])
            return
        if len(self._fresh) + len(text) >= self._fresh.room:
            self._sort()
        self._fresh.extend(text)
        self._fresh.end_text()

    def save(self, path: str | Path) -> None:
        """Write it to a file, under another name first.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        self._sort()
        tensors = {
            "tokens": torch.from_numpy(self._sorted.tokens.astype(np.int32)),
            "places": torch.from_numpy(np.array(self._sorted.order, dtype=np.int32)),
        }
        aside = Path(f"{path}.partial")
        try:
            save_file(tensors, aside, {"vocab_size": str(self.vocab_size), "tokenizer": self.tokenizer})
            os.replace(aside, path)
        except SafetensorError as error:  # the system's errors, in its own class
            raise OSError(f"{path}: {error}") from error
        finally:
            aside.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path, vocab_size: int, most_bytes: int = 1 << 27, tokenizer: str = "") -> "SuffixStore":
        """Read a store from a file; of one that is larger than `most_bytes` the latest texts.

        Raises:
            InputError: no store, one that is cut or damaged, or of another tokenizer.
        """
        store = cls(vocab_size, most_bytes, tokenizer)
        try:
            with safe_open(path, "numpy") as file:
                about = file.metadata() or {}
                tokens, places = file.get_tensor("tokens"), file.get_tensor("places")
        except (OSError, SafetensorError) as error:
            raise InputError(f"store: expected a store in {path}, found {str(error).splitlines()[0]}") from error
        if {tokens.dtype, places.dtype} != {np.dtype(np.int32)} or tokens.ndim + places.ndim != 2:
            raise InputError(f"store: expected tokens and places of 32 bits in {path}, found others")
        found = about.get("vocab_size"), about.get("tokenizer")
        if found != (str(vocab_size), tokenizer):
            raise InputError(
                f"store: expected texts of the target's tokenizer ({vocab_size} tokens) in {path}, found those of "
                f"another ({found[0]} tokens)"
            )
        damaged = bool((places % BYTES).any()) or (
            tokens.min(initial=0) < 0 or tokens.max(initial=0) > vocab_size or len(places) != max(0, len(tokens) - 1)
        )
        if damaged or places.min(initial=BYTES) < BYTES or places.max(initial=0) >= max(1, BYTES * len(tokens)):
            raise InputError(f"store: expected tokens and the places of all of them in {path}, found others")
        store._begin(tokens.astype(">u4").tobytes(), array("i", places.tobytes()))
        if len(tokens) > store._capacity - store._fresh.room:
            store._sort()
        return store

    def _begin(self, tokens: bytes, order: "array[int]") -> None:
        self._sorted = Index(len(tokens) // BYTES, tokens, order)
        self._fresh = Index(min(FRESH, self._capacity // 4))

    def _sort(self, text: np.ndarray | None = None) -> None:
        """Sort all texts together, and perhaps one more, without the oldest that there is no room for."""
        last = Index(0 if text is None else len(text) + 1)
        if text is not None:
            last.extend(text, sort=False)
            last.end_text()
        most = self._capacity - self._fresh.room
        tokens = np.concatenate([last.tokens, self._fresh.tokens, self._sorted.tokens])[:most]
        self._begin(tokens.astype(">u4").tobytes(), in_order(tokens))
