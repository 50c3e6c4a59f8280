"""A bounded store of earlier texts from which drafts are copied."""

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
from draftsmith.decode.proposers.suffix.index import BYTES, LARGEST, Index, sort_positions

PER_TOKEN = 2 * BYTES  # the bytes of a token and its place
FEWEST = 4096  # the least capacity of a store in tokens
MOST_BYTES = 1 << 32  # the greatest size of a store: places are 32-bit numbers
FRESH = 1 << 16  # the number of new tokens that are inserted one by one before all are sorted


class SuffixStore:
    """A store of earlier texts for `SuffixProposer`, for example a server's answers to other requests.

    Most texts are in one large index. New texts go to a small one, at some microseconds a token. When it is full, `add`
    sorts all texts together, at about a second per million tokens, and drops the oldest.

    `most_bytes` is the limit, at 8 bytes a token; sorting takes several times as much for a moment. `tokenizer`
    identifies the texts' tokenizer, for example by a digest of its vocabulary.
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
        """The indexes of the older texts and of the latest ones."""
        return self._sorted, self._fresh

    @property
    def nbytes(self) -> int:
        """The bytes of tokens and places."""
        return self._sorted.nbytes + self._fresh.nbytes

    def __len__(self) -> int:
        """Return the number of tokens, including the ends of texts."""
        return len(self._sorted) + len(self._fresh)

    def add(self, tokens: Tensor | np.ndarray | Sequence[int]) -> None:
        """Add a text of token ids, (N,), or its end if it is longer than the store.

        Raises:
            InputError: an id outside the vocabulary.
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
        """Write the store to a file, under a temporary name first.

        Raises:
            OSError: a full or read-only disk.
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
        except SafetensorError as error:  # safetensors wraps the system's errors
            raise OSError(f"{path}: {error}") from error
        finally:
            aside.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path, vocab_size: int, most_bytes: int = 1 << 27, tokenizer: str = "") -> "SuffixStore":
        """Read a store from a file; if it is larger than `most_bytes`, keep the latest texts.

        Raises:
            InputError: no store, a damaged one, or one of another tokenizer.
        """
        store = cls(vocab_size, most_bytes, tokenizer)
        try:
            with safe_open(path, "numpy") as file:
                metadata = file.metadata() or {}
                tokens, places = file.get_tensor("tokens"), file.get_tensor("places")
        except (OSError, SafetensorError) as error:
            raise InputError(f"store: expected a store in {path}, found {str(error).splitlines()[0]}") from error
        if {tokens.dtype, places.dtype} != {np.dtype(np.int32)} or tokens.ndim + places.ndim != 2:
            raise InputError(f"store: expected tokens and places of 32 bits in {path}, found others")
        stored_size, stored_tokenizer = metadata.get("vocab_size"), metadata.get("tokenizer")
        if (stored_size, stored_tokenizer) != (str(vocab_size), tokenizer):
            raise InputError(
                f"store: expected texts of the target's tokenizer ({vocab_size} tokens) in {path}, found those of "
                f"another ({stored_size} tokens)"
            )
        # A damaged store would make searches read outside of it.
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
        """Sort all texts together with an optional new one, and drop the oldest beyond the capacity."""
        last = Index(0 if text is None else len(text) + 1)
        if text is not None:
            last.extend(text, sort=False)
            last.end_text()
        # Tokens are stored from the last to the first, so a cut at the end drops the oldest.
        most = self._capacity - self._fresh.room
        tokens = np.concatenate([last.tokens, self._fresh.tokens, self._sorted.tokens])[:most]
        self._begin(tokens.astype(">u4").tobytes(), sort_positions(tokens))
