"""Training from a teacher cache: an index of its samples, and the distributions of each batch."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import TypedDict

from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase, track
from draftsmith.decode.validation import Amount, Count, Share
from draftsmith.train.data.mapped import Texts, map_completions
from draftsmith.train.data.shards import BaseManifest, read_manifest, read_shard
from draftsmith.train.losses.distributions import CachedDistributions
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.recipe import RecipeConfig
from draftsmith.train.teacher.cache_writer import identity
from draftsmith.train.teacher.distribution_shards import COLUMNS, NUMBERS, ROW_GROUP, SAMPLER, SCHEMA

Size = Annotated[int, Field(ge=1, le=2**31)]


class CacheManifest(BaseManifest):
    """The manifest of a cache."""

    vocab_size: Size


@dataclass
class SampleIndex:
    """The shard and row of samples in caches, by text: samples with equal tokens and loss masks share an entry.

    `texts` has the hashes of tokens and masks, ascending, uint64; `places` each one's shard and row, (N, 2).
    """

    texts: np.ndarray
    shards: list[Path]
    places: np.ndarray

    def find(self, text: int) -> tuple[Path, int]:
        """Return the shard and row of a sample."""
        shard, row = self.places[np.searchsorted(self.texts, np.uint64(text))].tolist()
        return self.shards[shard], row

    def load_target(self, config: RecipeConfig) -> PreTrainedModel | None:
        """Load what training needs of the target in addition to the cache; None for nothing."""
        return None

    def feed(self, trainer: Any) -> None:
        """Let the batches of a `RecipeTrainer` hold what is cached of them."""
        trainer.data_collator = CachedCollator(trainer.data_collator, self)

    @abstractmethod
    def columns(self, samples: Sequence[Mapping[str, Any]], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Return what is cached of rows of `TrainingData`, collated to `shape`, (B, T), with floats as integers."""


class LoadingError(InputError):
    """An InputError in a loading process, which torch makes again in the training process from its traceback."""

    def __init__(self, text: str):
        super().__init__(text.strip().rpartition("\n")[2].removeprefix(f"{__name__}.LoadingError: "))


class CachedCollator:
    """A collator that adds what a cache has of a batch, under `teacher`.

    It travels as integers, because a Trainer under DeepSpeed rounds floats to its training dtype.
    """

    def __init__(self, collator: Callable[[list[dict[str, Any]]], dict[str, Any]], index: SampleIndex):
        self.collator, self.index = collator, index

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate rows of `TrainingData`."""
        batch = self.collator(samples)
        try:
            columns = self.index.columns(samples, batch["input_ids"].shape)
        except InputError as error:
            raise LoadingError(str(error)) from error
        # The last entry: the Trainer takes the first tensor's length as the number of rows.
        batch["teacher"] = {name: torch.from_numpy(column) for name, column in columns.items()}
        return batch


@dataclass
class DistributionIndex(SampleIndex):
    """The shard and row of samples' distributions."""

    k: int
    vocab_size: int

    def columns(self, samples: Sequence[Mapping[str, Any]], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Return the bits of the distributions of all N loss positions, in order, also of packed rows' samples.

        `ids` are (N, k) int32, `log_p` (N, k) int16, `log_tail` and `log_p_of_text` (N,) int32; `cached_distributions`
        reads them as floats.
        """
        parts = [
            self._distributions(text, sum(label != IGNORED for label in sample["labels"][start + 1 : end]))
            for sample in samples
            for text, start, end in texts_of_row(sample)
        ]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in NUMBERS}
        return {name: column.view(f"int{8 * column.itemsize}") for name, column in columns.items()}

    def _distributions(self, text: int, count: int) -> dict[str, np.ndarray]:
        file, row = self.find(text)
        table = _read_group(file, row // ROW_GROUP)
        values = {column: table[column][row % ROW_GROUP].values.to_numpy() for column in NUMBERS}
        k, positions = self.k, len(values["log_tail"])
        if any(len(values[name]) != positions * width for name, width in {**SINGLE, "ids": k, "log_p": k}.items()):
            raise damage_error(file)
        for column in ("ids", "log_p"):
            values[column] = values[column].reshape(-1, k)
        ids = values["ids"]
        if positions < count or (ids < 0).any() or (ids >= self.vocab_size).any():
            raise damage_error(file)
        if any(not (values[column] <= MOST_LOG_P).all() for column in NUMBERS if column != "ids"):
            raise damage_error(file)
        return {column: value[:count] for column, value in values.items()}


class DistributionSettings(TypedDict):
    """The settings that determine the numbers of a cache of distributions."""

    k: Size
    temperature: Amount
    top_k: Count
    top_p: Share


class DistributionManifest(CacheManifest):
    """The manifest of a cache of distributions."""

    settings: DistributionSettings


def find_distributions(caches: Sequence[str], config: RecipeConfig, vocab_size: int) -> DistributionIndex:
    """Find the distributions of all samples of a training run, held-out ones included.

    The caches must together hold all completions of the run, for the config's target and sampling and with one k;
    otherwise, or if one is damaged, raise InputError. The target's weights are not needed.
    """
    manifests = read_manifests(caches, config, SCHEMA, DistributionManifest, vocab_size)
    widths = {path: manifest["settings"]["k"] for path, manifest in manifests.items()}
    for path, manifest in manifests.items():
        for name in SAMPLER:
            value, written = getattr(config, name), manifest["settings"][name]
            if written != value:
                remedy = f"train with that, or run draftsmith cache with --{name} {value}"
                raise InputError(f"{name}: expected {written}, which {path} was written at, found {value}; {remedy}")
        if widths[path] != widths[caches[0]]:
            two = f"{widths[caches[0]]} in {caches[0]} and {widths[path]} in {path}"
            raise InputError(f"teacher_cache: expected caches of one k, found {two}")
    return DistributionIndex(*locate(caches, config, COLUMNS), k=widths[caches[0]], vocab_size=vocab_size)


def read_manifests(
    caches: Sequence[str], config: RecipeConfig, schema: str, kind: Any, vocab_size: int
) -> dict[str, dict[str, Any]]:
    """Return the manifests (of type `kind`) of caches by path, which must be valid and of the run's target."""
    current, manifests = identity(config.target), dict[str, dict[str, Any]]()
    for path in caches:
        manifest = read_manifest(Path(path), schema, kind)
        if manifest is None:
            raise InputError(f"teacher_cache: expected a cache written by draftsmith cache, found none at {path}")
        if manifest["vocab_size"] != vocab_size:
            raise InputError(f"teacher_cache: expected {vocab_size} tokens, found {manifest['vocab_size']} in {path}")
        for name in sorted(current.keys() & manifest["target"].keys()):
            if current[name] != manifest["target"][name]:
                other = f"in {path} one of {manifest['target'].get('path')}, whose {name} is another"
                raise InputError(f"teacher_cache: expected a cache of {config.target}, found {other}")
        manifests[path] = manifest
    return manifests


@phase("finding what is cached")
def locate(
    caches: Iterable[str], config: RecipeConfig, columns: pa.Schema
) -> tuple[np.ndarray, list[Path], np.ndarray]:
    """Return the fields of a `SampleIndex` of all samples in some caches.

    `columns` is the schema of the caches' shards. Raise InputError if a sample of the training run is in no cache, or a
    shard is damaged.
    """
    files = [file for cache in caches for file in sorted(Path(cache).glob("*.parquet"))]
    hashes, places = [np.empty(0, np.uint64)], [np.empty((0, 2), np.int64)]
    with ThreadPoolExecutor() as pool:
        read = pool.map(partial(read_cached, columns=columns, names=["text"]), files)
        for at, shard in enumerate(track(read, "reading caches", "shards", len(files))):
            hashes.append(shard["text"].to_numpy())
            places.append(np.stack([np.full(len(shard), at), np.arange(len(shard))], axis=1))
    joined, output = np.concatenate(hashes), Path(str(config.training.output_dir))
    paths = (*config.completions, *config.heldout_directories)
    wanted = Texts({path: map_completions(path, output) for path in paths})
    missing = np.flatnonzero(~np.isin(wanted.column("text"), joined))
    if len(missing):
        names = ", ".join(wanted.ids(missing[:5], with_source=True)) + (", …" if len(missing) > 5 else "")
        text = f"teacher_cache: expected all {len(wanted)} samples of the run in {', '.join(caches)}"
        raise InputError(f"{text}, found {len(missing)} missing: {names}; run draftsmith cache")
    order = joined.argsort(kind="stable")
    return joined[order], files, np.concatenate(places)[order]


def read_cached(
    file: Path, columns: pa.Schema, *, row_group: int | None = None, names: list[str] | None = None
) -> pa.Table:
    """Read a shard of a cache, or only one row group or some columns of it; raise InputError if it is damaged."""
    shard = read_shard(file, columns, row_group=row_group, columns=names)
    if shard is None:
        raise damage_error(file)
    return shard


def damage_error(file: Path) -> InputError:
    """Return the error of a damaged shard."""
    return InputError(f"{file}: expected a shard of a teacher cache, found a damaged file; run draftsmith cache again")


SINGLE = {"log_p_of_text": 1}
MOST_LOG_P = 1e-3
"""The largest log probability: rounding may leave one a little above 0. Comparisons with NaN fail too."""


@lru_cache(maxsize=32)
def _read_group(file: Path, row_group: int) -> pa.Table:
    return read_cached(file, COLUMNS, row_group=row_group)


def texts_of_row(row: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """Return the hash of each sample in a row of `TrainingData`, and the bounds of its tokens there."""
    starts = [at for at, position in enumerate(row.get("position_ids", [0])) if position == 0]
    return list(zip(row["texts"], starts, [*starts[1:], len(row["labels"])], strict=True))


def cached_distributions(columns: dict[str, Tensor]) -> CachedDistributions:
    """Return the distributions that a `CachedCollator` added to a batch."""
    return CachedDistributions(**{name: columns[name].view(dtype) for name, dtype in NUMBERS.items()})
