"""Training from a feature cache: an index of its samples, and the states of each batch.

Shape suffixes: B rows, T tokens of a row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import TypedDict

from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import Count
from draftsmith.train.data.shards import schema_of
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
from draftsmith.train.teacher.target_ends import ENDS, load_ends

BITS: dict[torch.dtype, np.dtype[Any]] = {torch.bfloat16: np.dtype(np.int16), torch.float32: np.dtype(np.int32)}
"""Integers of a dtype's size, which a `CachedCollator` needs."""
EXPONENTS = {torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}
"""The exponent bits, all set in NaN and infinity."""


@dataclass
class FeatureIndex(SampleIndex):
    """The shard and row of samples' features, and the cached ends of their target.

    `layer_ids` are the layers to look up, of those in the cache: if empty, only the last hidden states are read.
    """

    layout: Layout
    ends: Path
    layer_ids: tuple[int, ...] = ()

    @property
    def widths(self) -> dict[str, int]:
        """The numbers of a token in each state that is looked up."""
        size = self.layout.hidden_size
        return {"features": len(self.layer_ids) * size, "hidden": size}

    def load_target(self, config: RecipeConfig) -> PreTrainedModel:
        """Load the ends of the target into the host's memory (`load_ends`)."""
        return load_ends(self.ends, config.target, trust_remote_code=config.trust_remote_code)

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
            cached = f"{list(self.layout.layer_ids)}, after which {self.ends.parent} has features"
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


class FeatureManifest(CacheManifest):
    """The manifest of a cache of features."""

    settings: FeatureSettings


def holds_features(cache: str) -> bool:
    """Return whether a cache is one of features, as its manifest tells."""
    return schema_of(Path(cache)) == SCHEMA


def find_features(caches: Sequence[str], config: RecipeConfig, vocab_size: int) -> FeatureIndex:
    """Find the features of all samples of a training run, held-out ones included.

    The caches must together hold all completions of the run, for the config's target and with one layout; otherwise,
    or if one is damaged, raise InputError. The target's weights are not needed. `of_layers` adds features to the last
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
    layout = layouts[caches[0]]
    return FeatureIndex(*locate(caches, config, layout.columns), layout=layout, ends=Path(caches[0]) / ENDS)


def cached_states(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the states that a `CachedCollator` added to a batch as floats, in the dtype of the cache."""
    dtype = torch.bfloat16 if columns["hidden"].dtype == torch.int16 else torch.float32
    return {name: values.view(dtype) for name, values in columns.items()}
