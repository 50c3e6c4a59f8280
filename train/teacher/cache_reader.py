"""Training from a teacher cache: the distributions of each batch, found by the sample they belong to."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from draftsmith.decode.errors import InputError
from draftsmith.train.data.collator import IGNORED
from draftsmith.train.data.mapped import Texts, map_completions
from draftsmith.train.data.shards import read_manifest, read_shard
from draftsmith.train.recipe import RecipeConfig
from draftsmith.train.teacher.cache_writer import (
    COLUMNS,
    NUMBERS,
    ROW_GROUP,
    SAMPLER,
    SCHEMA,
    digest,
    identity,
)
from draftsmith.train.teacher.distributions import CachedDistributions


@dataclass(frozen=True)
class DistributionIndex:
    """Where the distributions of samples are: those of equal tokens and loss masks are equal."""

    k: int
    texts: np.ndarray
    """The hashes of the samples' tokens and masks, ascending, uint64."""
    shards: list[Path]
    places: np.ndarray
    """The number of its shard, and its row there, of each sample in that order: (N, 2)."""

    def find(self, text: int) -> tuple[Path, int]:
        """Return the shard of a sample, and its row there."""
        shard, row = self.places[np.searchsorted(self.texts, np.uint64(text))].tolist()
        return self.shards[shard], row


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
    hashes, places, files = list[np.ndarray](), list[np.ndarray](), list[Path]()
    for path in (*config.completions, *config.heldout_directories):
        owner = owners.get(digest(path))
        if owner is None:
            raise InputError(
                f"teacher_cache: expected a cache of the completions {path} as they are, found none among "
                f"{', '.join(caches)}; run draftsmith cache"
            )
        texts = Texts({path: map_completions(path, Path(str(config.training.output_dir)))})
        shards, rows = _places(texts, *owner)
        hashes.append(texts.column("text"))
        places.append(rows + np.array([len(files), 0]))
        files += shards
    joined = np.concatenate(hashes)
    order = joined.argsort(kind="stable")
    return DistributionIndex(widths[caches[0]], joined[order], files, np.concatenate(places)[order])


def _places(texts: Texts, cache: Path, number: int) -> tuple[list[Path], np.ndarray]:
    """Return the shards of some completions in a cache, and each sample's shard and row there, (N, 2).

    Raises:
        InputError: names samples that are not there.
    """
    files = sorted(cache.glob(f"{number:03d}-shard-*.parquet"))
    with ThreadPoolExecutor() as pool:
        shards = list(pool.map(partial(_read, columns=["id", "text"]), files))
    places = [np.empty((0, 2), np.int64)]
    for at, shard in enumerate(shards):
        places.append(np.stack([np.full(len(shard), at), np.arange(len(shard))], axis=1))
    empty = pa.schema([COLUMNS.field(name) for name in ("id", "text")]).empty_table()
    cached = pa.concat_tables([empty, *shards]).combine_chunks()
    found = pc.index_in(texts.table["id"], value_set=cached["id"].combine_chunks()).fill_null(-1).to_numpy()
    there = found >= 0
    there[there] = cached["text"].to_numpy()[found[there]] == texts.column("checksum")[there]
    if not there.all():
        lacking = texts.ids(np.flatnonzero(~there)[:5])
        raise InputError(
            f"teacher_cache: expected all {len(texts)} samples of {texts.sources[0]}, found none in {cache} for "
            f"{', '.join(lacking)}{', …' if (~there).sum() > 5 else ''}; run draftsmith cache again"
        )
    return files, np.concatenate(places)[found]


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
        """Collate rows of `TrainingData`."""
        batch = self.collator(samples)
        parts = [self._distributions(*text) for sample in samples for text in _counted(sample)]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in NUMBERS}
        # Last, since the Trainer takes the first tensor's length for the number of rows.
        batch["teacher"] = {
            name: torch.from_numpy(column.view(f"int{8 * column.itemsize}")) for name, column in columns.items()
        }
        return batch

    def _distributions(self, text: int, count: int) -> dict[str, np.ndarray]:
        file, row = self.distributions.find(text)
        table = _read_group(file, row_group=row // ROW_GROUP)
        values = {column: table[column][row % ROW_GROUP].values.to_numpy() for column in NUMBERS}
        for column in ("ids", "log_p"):
            values[column] = values[column].reshape(-1, self.distributions.k)
        return {column: value[:count] for column, value in values.items()}


def _counted(row: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the hash of each sample of a row, and the count of its loss positions."""
    labels = row["labels"]
    starts = [at for at, position in enumerate(row.get("position_ids", [0])) if position == 0]
    return [
        (text, sum(label != IGNORED for label in labels[start + 1 : end]))
        for text, start, end in zip(row["texts"], starts, [*starts[1:], len(labels)], strict=True)
    ]


def cached_distributions(columns: dict[str, Tensor]) -> CachedDistributions:
    """Return the distributions that a `CachedCollator` added to a batch."""
    return CachedDistributions(**{name: columns[name].view(dtype) for name, dtype in NUMBERS.items()})
