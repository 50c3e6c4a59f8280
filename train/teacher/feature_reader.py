"""Training from features in a cache or from servers: an index of the samples, and the states of each batch.

Shape suffixes: B rows, T tokens of a row.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import TypedDict

from draftsmith.decode.cache.features import last_norm
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase
from draftsmith.decode.validation import Count
from draftsmith.train.data.shards import schema_of
from draftsmith.train.job.processes import is_first
from draftsmith.train.models import DTYPES, load_config, resolve_dtype
from draftsmith.train.recipe import RecipeConfig
from draftsmith.train.teacher.cache_reader import (
    CacheManifest,
    SampleIndex,
    Size,
    damage_error,
    locate,
    read_cached,
    read_manifests,
    texts_of_row,
)
from draftsmith.train.teacher.feature_shards import SCHEMA, Layout
from draftsmith.train.teacher.served import ServedModel, ServedTarget, urls_of
from draftsmith.train.teacher.served_check import LENGTHS, ask_servers, compare_states, require_length, require_served
from draftsmith.train.teacher.target_ends import read_ends

BITS: dict[torch.dtype, np.dtype[Any]] = {torch.bfloat16: np.dtype(np.int16), torch.float32: np.dtype(np.int32)}
"""Integers of a dtype's size, which a `CachedCollator` needs."""
EXPONENTS = {torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}
"""The exponent bits, all set in NaN and infinity."""


@dataclass
class FeatureIndex(SampleIndex):
    """The shard and row of samples' features, and the dtype of their target.

    `layer_ids` are the layers to look up, of those in the cache: if empty, only the last hidden states are read.
    """

    layout: Layout
    dtype: str
    layer_ids: tuple[int, ...] = ()

    @property
    def widths(self) -> dict[str, int]:
        """The numbers of a token in each state that is looked up."""
        size = self.layout.hidden_size
        return {"features": len(self.layer_ids) * size, "hidden": size}

    def load_target(self, config: RecipeConfig) -> PreTrainedModel:
        """Load the ends of the target into the host's memory (`read_ends`)."""
        with phase(f"reading the ends of {config.target}"):
            return read_ends(config.target, self.dtype, trust_remote_code=config.trust_remote_code)

    def states_of(self, sample: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the states of one row of `TrainingData`, (1, T, …), like `cached_states` for a batch."""
        columns = self.columns([sample], (1, len(sample["input_ids"])))
        return cached_states({name: torch.from_numpy(column) for name, column in columns.items()})

    def columns(self, samples: Sequence[Mapping[str, Any]], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Return the bits of a batch's states, `features` (B, T, F) and `hidden` (B, T, H).

        They are zeros at a text's last token and at padding. `cached_states` reads them as floats.
        """
        states = {name: np.zeros((*shape, width), BITS[self.layout.dtype]) for name, width in self.widths.items()}
        parts = [(row, *part) for row, sample in enumerate(samples) for part in texts_of_row(sample)]
        texts = [(text, samples[row]["input_ids"][start:end]) for row, text, start, end in parts]
        for (row, _, start, end), columns in zip(parts, self.read(texts), strict=True):
            for name, values in columns.items():
                count = min(len(values), end - start)  # a text may have been cut after the cache was written
                states[name][row, start : start + count] = values[:count]
        return states

    def read(self, texts: Sequence[tuple[int, list[int]]]) -> Iterator[dict[str, np.ndarray]]:
        """Yield the states of texts, given by their hashes and tokens: (T − 1, …) at least for T tokens."""
        return (self._states(text, len(ids) - 1) for text, ids in texts)

    def _states(self, text: int, count: int) -> dict[str, np.ndarray]:
        """Return the states of a text, of `count` tokens at least."""
        file, row = self.find(text)
        layout, states = self.layout, dict[str, np.ndarray]()
        names = [name for name, width in self.widths.items() if width]
        table = read_cached(file, layout.columns, row_group=row, names=names)
        for name in names:
            width, values = layout.widths[name], table[name][0].values
            # A view of Arrow's buffer, which may begin before the values.
            bits = np.frombuffer(values.buffers()[1] or b"", BITS[layout.dtype]).reshape(-1, width)
            states[name] = bits[values.offset : values.offset + len(values)]
            infinite = (states[name] & EXPONENTS[layout.dtype] == EXPONENTS[layout.dtype]).any()
            if infinite or len(states[name]) < count:
                raise damage_error(file)
        if self.layer_ids:
            states["features"] = self.picked(states["features"])
        return states

    def of_layers(self, layer_ids: Sequence[int]) -> "FeatureIndex":
        """Return this index restricted to the features after some layers, which must all be cached."""
        if not set(layer_ids) <= set(self.layout.layer_ids):
            cached = f"{list(self.layout.layer_ids)}, after which {self.shards[0].parent} has features"
            other = f"{list(layer_ids)}; run draftsmith cache with these"
            raise InputError(f"layer_ids: expected some of {cached}, found {other}")
        return replace(self, layer_ids=tuple(layer_ids))

    def picked(self, features: np.ndarray) -> np.ndarray:
        """Return the features of `layer_ids`, (T, F), from those of all cached layers."""
        cached = self.layout.layer_ids
        if self.layer_ids == cached:
            return features
        by_depth = features.reshape(len(features), len(cached), -1)
        return by_depth[:, [cached.index(depth) for depth in self.layer_ids]].reshape(len(features), -1)


class FeatureSettings(TypedDict):
    """The settings that determine the numbers of a cache of features."""

    layer_ids: list[Count]
    hidden_size: Size
    feature_dtype: Literal["bfloat16", "float32"]
    dtype: Literal["float64", "float32", "bfloat16", "float16"]


class FeatureManifest(CacheManifest):
    """The manifest of a cache of features."""

    settings: FeatureSettings


def holds_features(cache: str) -> bool:
    """Return whether a cache is one of features, as its manifest tells."""
    return schema_of(Path(cache)) == SCHEMA


def find_features(caches: Sequence[str], config: RecipeConfig, vocab_size: int) -> FeatureIndex:
    """Find the features of all samples of a training run, held-out ones included.

    The caches must together hold all completions of the run, for the config's target and with one layout; otherwise,
    or if one is damaged, raise InputError. `of_layers` adds features to the last
    hidden states.
    """
    manifests = read_manifests(caches, config, SCHEMA, FeatureManifest, vocab_size)
    layouts = {}
    for path, manifest in manifests.items():
        settings = manifest["settings"]
        layouts[path] = Layout(tuple(settings["layer_ids"]), settings["hidden_size"], settings["feature_dtype"])
        if layouts[path] != layouts[caches[0]]:
            one, other = layouts[caches[0]], layouts[path]
            raise InputError(
                f"teacher_cache: expected caches of one layout, found layers {list(one.layer_ids)} in "
                f"{one.feature_dtype} in {caches[0]}, and {list(other.layer_ids)} in {other.feature_dtype} in {path}"
            )
    layout, dtype = layouts[caches[0]], manifests[caches[0]]["settings"]["dtype"]
    return FeatureIndex(*locate(caches, config, layout.columns), layout=layout, dtype=dtype)


def cached_states(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the states that a `CachedCollator` added to a batch as floats, in the dtype of the cache."""
    dtype = torch.bfloat16 if columns["hidden"].dtype == torch.int16 else torch.float32
    return {name: values.view(dtype) for name, values in columns.items()}


WORKERS = 4
"""The most loading processes of a run that asks for none: while training computes, each asks for a batch."""


@dataclass
class ServedIndex(FeatureIndex):
    """The features of a target on servers. `norm` is its last one, on the CPU, once the target's ends are loaded."""

    urls: list[str] = field(default_factory=list)
    config: Any = None
    served: Any = None
    norm: nn.Module | None = None
    _target: ServedTarget | None = None
    """The connections of this process."""

    def load_target(self, config: RecipeConfig) -> PreTrainedModel:
        """Load the ends of the target from its files into the host's memory, and keep a norm in the servers' dtype."""
        ends = super().load_target(config)
        norm = deepcopy(last_norm(ends))
        self.norm = None if norm is None else norm.to(DTYPES[self.served.dtype])
        return ends

    def of_layers(self, layer_ids: Sequence[int]) -> "ServedIndex":
        """Return the index of the features after some layers, which the servers must give."""
        target_config = load_config(self.config.target, trust_remote_code=self.config.trust_remote_code)
        require_served(self.served, self.urls[0], target_config, layer_ids)
        layout = replace(self.layout, layer_ids=tuple(layer_ids))
        return replace(self, layout=layout, layer_ids=tuple(layer_ids))

    def feed(self, trainer: Any) -> None:
        """Compare the servers' states with the target, and let the batches hold them."""
        if self._target is not None:  # a process that is forked from now on needs its own
            self._target.__exit__()
            self._target = None
        longest = max(int(part.sizes.max()) for part in (trainer.data, trainer.eval_dataset) if part is not None)
        require_length(self.served, longest)
        if is_first():
            config, data = self.config, trainer.data
            pairs = zip(data.members, data.sizes, LENGTHS, strict=False)  # there may be fewer samples
            rows = [data.texts.read(int(at), min(int(size), length))[0].tolist() for at, size, length in pairs]
            compare_states(self.urls, config.target, trainer.target_ends, rows, config.trust_remote_code)
        args = trainer.args
        args.dataloader_num_workers = args.dataloader_num_workers or min(WORKERS, os.cpu_count() or 1)
        args.dataloader_prefetch_factor = args.dataloader_prefetch_factor or 1  # a batch may have gigabytes
        super().feed(trainer)

    def read(self, texts: Sequence[tuple[int, list[int]]]) -> Iterator[dict[str, np.ndarray]]:
        """Yield the states of texts from the servers."""
        if self._target is None:
            self._target = ServedTarget(self.urls, self.norm, served=self.served).__enter__()
        bits = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[self.layout.dtype]
        for _, (states,) in self._target.states(self.layout, [ids for _, ids in texts]):
            yield {name: tensor.view(bits).numpy() for name, tensor in states.items()}


def find_served(config: RecipeConfig) -> ServedIndex:
    """Ask the servers of a config what they serve, require that it is its target, and return their index."""
    urls, code = urls_of(config.teacher), config.trust_remote_code
    served: ServedModel = ask_servers(urls, config.target, code, config.any_target)
    layout = Layout((), served.hidden_size, served.feature_dtype)
    dtype = resolve_dtype(config.target_dtype, config.target, device=config.training.device, trust_remote_code=code)
    nothing = np.empty(0, np.uint64), list[Path](), np.empty((0, 2), np.int64)
    return ServedIndex(*nothing, layout, dtype, urls=urls, config=config, served=served)
