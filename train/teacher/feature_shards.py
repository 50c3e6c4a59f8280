"""Cache shards of the target's features on its completions.

For each token except a text's last, a shard has the hidden states after the layers of `Layout.layer_ids`, and the last
ones, which the target's head reads: with the head, a file next to the shards, these give the exact distribution at any
temperature, top-k and top-p. At Qwen3-8B's width of 4,096 and in bfloat16 a token takes 3 × 8,192 + 8,192 bytes; k
tokens of the distribution in place of the last states would take 6k + 8, and only bound divergences. Nothing is
compressed: zstd saves a fifth, but is slower than disks.

Each sample is a row group of its own, to be read and written alone: at 32k tokens it has a GiB.

Shape suffixes: B texts, T tokens, P positions (T − 1), F features, H hidden.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.decode.cache import own_positions
from draftsmith.decode.cache.features import check_layers, collect_states, default_layers
from draftsmith.decode.errors import InputError
from draftsmith.train.checkpoint import is_finite
from draftsmith.train.files import atomic_path
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.models import DTYPES, load_config
from draftsmith.train.teacher.cache_config import CacheConfig
from draftsmith.train.teacher.sources import Source, Text, batches_of, pad_rows

SCHEMA = "draftsmith.features/2"
STATES = ("features", "hidden")
"""Columns of a shard: the states after some layers, (P, F), and those that the head reads, (P, H)."""


@dataclass(frozen=True)
class Layout:
    """The states of each token and their dtype; features are taken after the layers `layer_ids`, ascending, if any."""

    layer_ids: tuple[int, ...]
    hidden_size: int
    feature_dtype: str

    @classmethod
    def of(cls, config: CacheConfig, target: PretrainedConfig) -> "Layout":
        """Return the layout that a config asks for; raise InputError for layers that the target does not have."""
        text = target.get_text_config()
        layer_ids = default_layers(text.num_hidden_layers) if config.layer_ids is None else config.layer_ids
        if layer_ids:
            check_layers(layer_ids, text.num_hidden_layers, "layer_ids")
        return cls(tuple(layer_ids), text.hidden_size, config.feature_dtype or "bfloat16")

    @property
    def widths(self) -> dict[str, int]:
        """The numbers of a token in each of `STATES`; without layers there are no features."""
        widths = {"features": len(self.layer_ids) * self.hidden_size, "hidden": self.hidden_size}
        return {name: width for name, width in widths.items() if width}

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the numbers."""
        return DTYPES[self.feature_dtype]

    @property
    def position_bytes(self) -> int:
        """The bytes of a token."""
        return sum(self.widths.values()) * self.dtype.itemsize

    @cached_property
    def columns(self) -> pa.Schema:
        """The schema of a shard."""
        states = [(name, pa.list_(pa.binary(width * self.dtype.itemsize))) for name, width in self.widths.items()]
        return pa.schema([("id", pa.string()), ("text", pa.uint64()), *states])


States = Iterator[tuple[list[int], list[dict[str, Tensor]]]]
"""The numbers of some texts and their `STATES`, until all texts had their turn."""


@dataclass(frozen=True)
class FeatureShards:
    """The writer of a cache of features.

    `sample_bytes` bounds Parquet's overhead for a sample. `checked` are the columns to read for a check that an
    existing shard is complete: reading all would take as long as training, which finds damage anyway.
    """

    config: CacheConfig
    layout: Layout

    schema = SCHEMA
    title = "feature cache"
    remedy = "free some space or give fewer --completions"
    sample_bytes = 1024
    checked = ("id", "text")

    @classmethod
    def of(cls, config: CacheConfig) -> "FeatureShards":
        """Return the writer that a config asks for; raise InputError for layers that the target does not have."""
        target = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
        return cls(config, Layout.of(config, target))

    @property
    def columns(self) -> pa.Schema:
        """The schema of a shard."""
        return self.layout.columns

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that determine all numbers, in addition to the target and the texts."""
        return asdict(self.layout) | {"layer_ids": list(self.layout.layer_ids)}

    @property
    def position_bytes(self) -> int:
        """The bytes of a position."""
        return self.layout.position_bytes

    @property
    def shape(self) -> str:
        """The settings that the size depends on, in words."""
        depths = ", ".join(map(str, self.layout.layer_ids))
        layers = f"layers {depths} and the last" if depths else "the last layer"
        return f"of {layers}, in {self.layout.feature_dtype}"

    def positions(self, text: Text) -> int:
        """Return the number of cached positions of a text: all except the last."""
        return len(text[1]) - 1

    def write(
        self, path: Path, source: Source, texts: list[Text], compute: Callable[..., States], done: Callable[[int], Any]
    ) -> None:
        """Compute or ask for the states of a source and write its shard; `done` gets each batch's number of samples."""
        with shard_writer(path, self.columns) as writer, ThreadPoolExecutor(1) as disk:
            writing: Future[None] | None = None  # writes a batch while the next is computed: two are in memory
            for rows, states in compute(self.layout, [ids for _, ids, _ in texts]):
                if writing is not None:
                    writing.result()
                writing = disk.submit(self._write_batch, writer, source, rows, states)
                done(len(rows))
            if writing is not None:
                writing.result()

    def _write_batch(
        self, writer: pq.ParquetWriter, source: Source, rows: list[int], states: list[dict[str, Tensor]]
    ) -> None:
        for i, text_states in zip(rows, states, strict=True):
            if not all(is_finite(tensor) for tensor in text_states.values()):
                where, dtype = f"{source.samples[i][0]!r} of {source.completions}", self.config.dtype
                remedy = f"try another --dtype than {dtype}"
                raise InputError(f"target: expected finite hidden states, found others in sample {where}; {remedy}")
            writer.write_table(_row(self.columns, source.samples[i], text_states))


def live_states(model: PreTrainedModel, batch_size: int, layout: Layout, texts: Sequence[list[int]]) -> States:
    """Yield the states by a target in memory, of batches of texts of similar length, the longest first."""
    for rows in batches_of(texts, batch_size):
        yield rows, states_of(model, layout, [texts[row] for row in rows])


@torch.inference_mode()
def states_of(model: PreTrainedModel, layout: Layout, texts: Sequence[list[int]]) -> list[dict[str, Tensor]]:
    """Return the `STATES` of a batch of texts, (T − 1, F) and (T − 1, H) for a text of T tokens, on the CPU."""
    ids_BT = pad_rows(texts, model.device)
    with collect_states(model, False, layout.layer_ids) as states:
        # Padding follows the texts, so causal attention never reads it.
        hidden_BTH = last_hidden(model, input_ids=ids_BT, **own_positions(model, list(map(len, texts)), ids_BT))
    whole = [states_BTX.to(layout.dtype).cpu() for states_BTX in (*states.features, hidden_BTH)]
    return [
        dict(zip(layout.widths, (states_BTX[row, : len(ids) - 1] for states_BTX in whole), strict=True))
        for row, ids in enumerate(texts)
    ]


@contextmanager
def shard_writer(path: Path, columns: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """Yield a writer whose tables become row groups of a shard; the shard is on the disk when the block ends."""
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
    with atomic_path(path) as aside, aside.open("wb") as file:
        with pq.ParquetWriter(file, columns, **options) as writer:
            yield writer
        file.flush()
        os.fsync(file.fileno())


def _row(columns: pa.Schema, sample: tuple[str, int], states: dict[str, Tensor]) -> pa.Table:
    name, text = sample
    arrays = [pa.array([name], pa.string()), pa.array([text], pa.uint64())]
    for column, states_PX in states.items():
        kind = columns.field(column).type
        content = pa.py_buffer(states_PX.contiguous().view(torch.uint8).numpy())  # Arrow wraps the bytes: no copy
        values = pa.FixedSizeBinaryArray.from_buffers(kind.value_type, len(states_PX), [None, content])
        arrays.append(pa.ListArray.from_arrays(pa.array([0, len(states_PX)], pa.int32()), values))
    return pa.Table.from_arrays(arrays, schema=columns)
