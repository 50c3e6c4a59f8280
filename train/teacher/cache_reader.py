"""Training from a teacher cache: the distributions of each batch, found by the sample they belong to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from draftsmith.decode.errors import InputError
from draftsmith.train.data.collator import IGNORED
from draftsmith.train.data.shards import read_manifest, read_shard
from draftsmith.train.recipe import RecipeConfig
from draftsmith.train.teacher.cache_writer import (
    COLUMNS,
    NUMBERS,
    ROW_GROUP,
    SAMPLER,
    SCHEMA,
    checksum,
    digest,
    identity,
    samples_of,
    texts_of,
)
from draftsmith.train.teacher.distributions import CachedDistributions

Places = dict[tuple[str, int], tuple[Path, int]]
"""(a sample's id, the checksum of its tokens) → (shard, row)."""


@dataclass(frozen=True)
class DistributionIndex:
    """Where the distributions of samples are."""

    k: int
    places: Places


def find_distributions(caches: Sequence[str], config: RecipeConfig, vocab_size: int) -> DistributionIndex:
    """Find the distributions of every sample that a training run learns from, or is measured on.

    Args:
        caches: directories that `make_cache` wrote; together they have the distributions of all completions.
        config: says which completions, target, sampling and length; the target's weights need not be there.
        vocab_size: its tokenizer's.

    Raises:
        InputError: a cache is missing, malformed or damaged, or of another sampling, target or k than the rest; or
            completions or samples are in none: names them.
    """
    known = identity(config.target, config.trust_remote_code)
    owners: dict[str, tuple[Path, int]] = {}  # a manifest's digest → the cache, and the number of its completions there
    widths: dict[str, int] = {}
    for path in caches:
        manifest = read_manifest(Path(path), SCHEMA)
        if manifest is None:
            raise InputError(f"teacher_cache: expected a cache written by draftsmith cache, found none at {path}")
        settings = manifest["settings"]
        for name in SAMPLER:
            value = getattr(config, name)
            if settings[name] != value:
                raise InputError(
                    f"{name}: expected {settings[name]}, which {path} was written at, found {value}; train with that, "
                    f"or run draftsmith cache with --{name} {value}"
                )
        if manifest["vocab_size"] != vocab_size:
            raise InputError(f"teacher_cache: expected {vocab_size} tokens, found {manifest['vocab_size']} in {path}")
        for name in known.keys() & manifest["target"].keys():
            if known[name] != manifest["target"][name]:
                raise InputError(
                    f"teacher_cache: expected a cache of {config.target}, found in {path} one of "
                    f"{manifest['target']['path']}, whose {name} is another"
                )
        widths[path] = settings["k"]
        if widths[path] != widths[caches[0]]:
            raise InputError(
                f"teacher_cache: expected caches of one k, found {widths[caches[0]]} in {caches[0]} and {widths[path]} "
                f"in {path}"
            )
        for number, part in enumerate(manifest["completions"]):
            owners.setdefault(part["sha256"], (Path(path), number))
    places: Places = {}
    for path in (*config.completions, *config.heldout):
        owner = owners.get(digest(path))
        if owner is None:
            raise InputError(
                f"teacher_cache: expected a cache of the completions {path} as they are, found none among "
                f"{', '.join(caches)}; run draftsmith cache"
            )
        places.update(_places(path, *owner, config.max_length))
    return DistributionIndex(widths[caches[0]], places)


def _places(path: str, cache: Path, number: int, max_length: int | None) -> Places:
    rows: dict[tuple[str, int], tuple[Path, int]] = {}
    for file in sorted(cache.glob(f"{number:03d}-shard-*.parquet")):
        shard = _read(file, columns=["id", "text"])
        rows.update((sample, (file, row)) for row, sample in enumerate(samples_of(shard)))
    places: Places = {}
    lacking = []
    for file in sorted(Path(path).glob("shard-*.parquet")):
        for name, ids, mask in texts_of(file):
            place = rows.get((name, checksum(ids, mask)))
            if place is None:
                lacking.append(name)
            else:
                places[name, checksum(ids[:max_length])] = place
    if lacking:
        raise InputError(
            f"teacher_cache: expected all {len(places) + len(lacking)} samples of {path}, found none in {cache} for "
            f"{', '.join(lacking[:5])}{', …' if len(lacking) > 5 else ''}; run draftsmith cache again"
        )
    return places


def _read(file: Path, **options: Any) -> pa.Table:
    shard = read_shard(file, COLUMNS, **options)
    if shard is None:
        raise InputError(
            f"{file}: expected a shard of a teacher cache, found a damaged file; run draftsmith cache again"
        )
    return shard


_read_group = lru_cache(maxsize=32)(_read)


class CachedCollator:
    """Adds to a batch, under `teacher`, what the cache holds of its loss positions, row by row.

    Positions are one behind the other over rows, and over the samples of packed rows: `ids` (N, k) int32, `log_p`
    (N, k) int16, `log_tail` and `log_p_of_text` (N,) int32. `cached_distributions` makes floats of their bits; a
    Trainer under DeepSpeed would round floats to the draft's dtype on the way.
    """

    def __init__(self, collator: Callable[[list[dict[str, Any]]], dict[str, Any]], distributions: DistributionIndex):
        self.collator = collator
        self.distributions = distributions

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate samples of `id`, `input_ids` and `labels`, or packed rows, of `ids` and `position_ids` as well."""
        batch = self.collator(samples)
        parts = [self._distributions(*text) for sample in samples for text in _unpacked(sample)]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in NUMBERS}
        # Last, since the Trainer takes the first tensor's length for the number of rows.
        batch["teacher"] = {
            name: torch.from_numpy(column.view(f"int{8 * column.itemsize}")) for name, column in columns.items()
        }
        return batch

    def _distributions(self, name: str, input_ids: list[int], count: int) -> dict[str, np.ndarray]:
        file, row = self.distributions.places[name, checksum(input_ids)]
        table = _read_group(file, row_group=row // ROW_GROUP)
        values = {column: table[column][row % ROW_GROUP].values.to_numpy() for column in NUMBERS}
        for column in ("ids", "log_p"):
            values[column] = values[column].reshape(-1, self.distributions.k)
        return {column: value[:count] for column, value in values.items()}


def _unpacked(sample: dict[str, Any]) -> list[tuple[str, list[int], int]]:
    """Return id, tokens and the count of loss positions of a sample, or of each in a packed row."""
    input_ids, labels = sample["input_ids"], sample["labels"]
    if "position_ids" in sample:
        names = sample["ids"]
        starts = [at for at, position in enumerate(sample["position_ids"]) if position == 0]
    else:
        names, starts = [sample["id"]], [0]
    return [
        (name, input_ids[start:end], sum(label != IGNORED for label in labels[start + 1 : end]))
        for name, start, end in zip(names, starts, [*starts[1:], len(input_ids)], strict=True)
    ]


def cached_distributions(columns: dict[str, Tensor]) -> CachedDistributions:
    """Return the distributions that a `CachedCollator` added to a batch."""
    return CachedDistributions(**{name: columns[name].view(dtype) for name, dtype in NUMBERS.items()})
