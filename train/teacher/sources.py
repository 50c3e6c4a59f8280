"""Shards of completions, the sources of cache shards."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.train.data.shards import read_completions

Text = tuple[str, list[int], list[int]]
"""The id, tokens and loss mask of a sample."""


@dataclass(frozen=True)
class Source:
    """A shard of completions, and the cache shard made from it: its name, sample ids and hashes, and positions.

    `longest` is in tokens.
    """

    completions: Path
    name: str
    samples: tuple[tuple[str, int], ...]
    positions: int
    longest: int = 0


def texts_of(file: Path, vocab_size: int | None = None) -> list[Text]:
    """Read the texts of a shard of completions, and require ids below `vocab_size`, if given."""
    shard = read_completions(file, vocab_size)
    columns = (shard[name].to_pylist() for name in ("id", "input_ids", "loss_mask"))
    return list(zip(*columns, strict=True))


def batches_of(texts: Sequence[list[int]], size: int) -> list[list[int]]:
    """Return the numbers of the texts of each batch, sorted by length, longest first."""
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]), reverse=True)
    return [order[at : at + size] for at in range(0, len(order), size)]


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return rows of different lengths as one tensor, (B, T) int64, padded with zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
