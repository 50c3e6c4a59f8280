"""Shards of completions, each of which becomes a shard of a cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor

from draftsmith.train.data.mapped import checksum
from draftsmith.train.data.shards import read_completions

Text = tuple[str, list[int], list[int]]
"""The id, tokens and loss mask of a sample."""


@dataclass(frozen=True)
class Source:
    """A shard of completions, and the cache shard that it becomes."""

    completions: Path
    name: str
    samples: tuple[tuple[str, int], ...]
    """Ids and checksums."""
    positions: int
    """How many of the texts' positions the cache has something of."""


def texts_of(file: Path, vocab_size: int | None = None) -> list[Text]:
    """Read ids, tokens and loss masks of a shard of completions.

    Args:
        file: the shard.
        vocab_size: what the ids of its tokens must be below; not looked at if None.

    Raises:
        InputError: names the file, which is damaged or holds what `prepare` does not write.
    """
    shard = read_completions(file, vocab_size)
    columns = (shard[name].to_pylist() for name in ("id", "input_ids", "loss_mask"))
    return list(zip(*columns, strict=True))


def checksums_of(texts: list[Text]) -> tuple[tuple[str, int], ...]:
    """Return the id of each sample, and what tells its text from others."""
    return tuple((name, checksum(ids, mask)) for name, ids, mask in texts)


def samples_of(shard: pa.Table) -> tuple[tuple[str, int], ...]:
    """Return the id and the text's checksum of each sample that a shard of a cache has."""
    return tuple(zip(shard["id"].to_pylist(), shard["text"].to_pylist(), strict=True))


def batches_of(texts: list[Text], size: int) -> list[list[int]]:
    """Return the numbers of the samples of each batch: of similar length together, the longest first."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i][1]), reverse=True)
    return [order[at : at + size] for at in range(0, len(order), size)]


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return rows of numbers of different lengths as one tensor, (B, T) int64, with zeros behind them."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
