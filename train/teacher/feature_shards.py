"""The target's features on its completions, as a cache holds them: drafting heads learn from them without the target.

Of each token but a text's last, a shard has the hidden states behind the layers of `Layout.layer_ids`, and those that
the target's head sees: with the head, which lies beside the shards, they are the exact distribution at any temperature,
top-k and top-p. At Qwen3-8B's width of 4,096 and in bfloat16 that is 3 × 8,192 + 8,192 bytes a token; k tokens of the
distribution in place of the last states would take 6k + 8, and give bounds of divergences. Nothing is compressed: zstd
saves a fifth of it, and would be slower than disks are.

A sample is a row and a row group of its own, so that it is read, and written, alone: at 32k tokens it has a GiB.

Shape suffixes: B texts, T tokens, P places (T − 1), F features, H hidden.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.decode.cache import own_positions
from draftsmith.decode.cache.features import check_layers, collected, default_layers
from draftsmith.decode.errors import InputError
from draftsmith.train.files import written_aside
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.models import DTYPES, load_config
from draftsmith.train.teacher.cache_config import CacheConfig
from draftsmith.train.teacher.sources import Source, Text, batches_of, padded

SCHEMA = "draftsmith.features/1"
STATES = ("features", "hidden")
"""Columns of a shard: behind some layers, (P, F), and what the head sees, (P, H)."""


@dataclass(frozen=True)
class Layout:
    """What each token's states are, and in how many bytes."""

    layer_ids: tuple[int, ...]
    """Behind how many of the target's layers features are taken, ascending."""
    hidden_size: int
    feature_dtype: str

    @classmethod
    def of(cls, config: CacheConfig, target: PretrainedConfig) -> "Layout":
        """Return that of a cache as a config says.

        Raises:
            InputError: depths that the target does not have.
        """
        text = target.get_text_config()
        layer_ids = config.layer_ids or default_layers(text.num_hidden_layers)
        check_layers(layer_ids, text.num_hidden_layers, "layer_ids")
        return cls(tuple(layer_ids), text.hidden_size, config.feature_dtype)

    @property
    def widths(self) -> dict[str, int]:
        """How many numbers a token has in each of `STATES`."""
        return {"features": len(self.layer_ids) * self.hidden_size, "hidden": self.hidden_size}

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers."""
        return DTYPES[self.feature_dtype]

    @property
    def position_bytes(self) -> int:
        """Bytes of a token."""
        return sum(self.widths.values()) * self.dtype.itemsize

    @cached_property
    def columns(self) -> pa.Schema:
        """Those of a shard."""
        states = [(name, pa.list_(pa.binary(width * self.dtype.itemsize))) for name, width in self.widths.items()]
        return pa.schema([("id", pa.string()), ("text", pa.int64()), *states])


@dataclass(frozen=True)
class FeatureShards:
    """How a cache of features is written."""

    config: CacheConfig
    layout: Layout

    schema = SCHEMA
    title = "feature cache"
    way_out = "free some space or give fewer --completions"
    sample_bytes = 1024
    """What Parquet says of each sample, at most."""
    checked = ("id", "text")
    """The columns that say whether a shard that is there is whole: to read all of it would take as long as to train on
    it. What is damaged is found then."""

    @classmethod
    def of(cls, config: CacheConfig) -> "FeatureShards":
        """Return how a cache is written as a config says.

        Raises:
            InputError: depths that the target does not have.
        """
        target = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
        return cls(config, Layout.of(config, target))

    @property
    def columns(self) -> pa.Schema:
        """Those of a shard."""
        return self.layout.columns

    @property
    def settings(self) -> dict[str, Any]:
        """What determines every number, beside the target and the texts."""
        layout = self.layout
        return {
            "layer_ids": list(layout.layer_ids),
            "hidden_size": layout.hidden_size,
            "feature_dtype": layout.feature_dtype,
            "window": self.config.window is not None,
        }

    @property
    def position_bytes(self) -> int:
        """Bytes of a position."""
        return self.layout.position_bytes

    @property
    def shape(self) -> str:
        """What they depend on, for the estimate."""
        depths = ", ".join(map(str, self.layout.layer_ids))
        return f"of layers {depths} and the last, in {self.config.feature_dtype}"

    def positions(self, text: Text) -> int:
        """Return of how many positions of a text there is something: of each that has a token behind it."""
        return len(text[1]) - 1

    def write(
        self, path: Path, source: Source, texts: list[Text], model: PreTrainedModel, done: Callable[[int], Any]
    ) -> None:
        """Compute a shard and write it whole, with two batches in memory at most.

        Args:
            path: where.
            source: what it is of.
            texts: the source's.
            model: the target.
            done: told of how many samples more have been computed.

        Raises:
            InputError: states that are not finite.
            OSError: the disk is full, or cannot be written; nothing is left behind.
        """
        with shard_writer(path, self.columns) as writer, ThreadPoolExecutor(1) as disk:
            writing: Future[None] | None = None  # a batch, while the next one is computed
            for rows in batches_of(texts, self.config.batch_size):
                states = states_of(model, self.layout, [texts[i][1] for i in rows])
                if writing is not None:
                    writing.result()
                writing = disk.submit(self._write_batch, writer, source, rows, states)
                done(len(rows))
            if writing is not None:
                writing.result()

    def _write_batch(
        self, writer: pq.ParquetWriter, source: Source, rows: list[int], states: list[dict[str, Tensor]]
    ) -> None:
        for i, of_text in zip(rows, states, strict=True):
            if not all(each.isfinite().all() for each in of_text.values()):
                raise InputError(
                    f"target: expected finite hidden states, found others in sample {source.samples[i][0]!r} of "
                    f"{source.completions}; try another --dtype than {self.config.dtype}"
                )
            writer.write_table(_row(self.columns, source.samples[i], of_text))


@torch.inference_mode()
def states_of(model: PreTrainedModel, layout: Layout, texts: Sequence[list[int]]) -> list[dict[str, Tensor]]:
    """Return the states of some texts of T tokens, computed together.

    Args:
        model: the target.
        layout: which states.
        texts: token ids of B texts.

    Returns:
        For each text its `STATES`, (T − 1, F) and (T − 1, H), on the CPU.
    """
    ids_BT = padded(texts, model.device)
    with collected(model, layout.layer_ids) as features:
        # Padding stands behind the texts, where they do not look.
        hidden_BTH = last_hidden(model, input_ids=ids_BT, **own_positions(model, list(map(len, texts)), ids_BT))
    whole = [states_BTX.to(layout.dtype).cpu() for states_BTX in (features[0], hidden_BTH)]
    return [
        dict(zip(STATES, (states_BTX[row, : len(ids) - 1] for states_BTX in whole), strict=True))
        for row, ids in enumerate(texts)
    ]


@contextmanager
def shard_writer(path: Path, columns: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """Give what writes a shard table by table, each as a row group, and have it appear whole when the block ends well.

    Raises:
        OSError: the disk is full, or cannot be written; nothing is left behind.
    """
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
    with written_aside(path) as aside, aside.open("wb") as file:
        with pq.ParquetWriter(file, columns, **options) as writer:
            yield writer
        file.flush()
        os.fsync(file.fileno())


def _row(columns: pa.Schema, sample: tuple[str, int], states: dict[str, Tensor]) -> pa.Table:
    name, text = sample
    arrays = [pa.array([name], pa.string()), pa.array([text], pa.int64())]
    for column, of_text in states.items():
        kind = columns.field(column).type
        content = pa.py_buffer(of_text.contiguous().view(torch.uint8).numpy())
        places = pa.FixedSizeBinaryArray.from_buffers(kind.value_type, len(of_text), [None, content])
        arrays.append(pa.ListArray.from_arrays(pa.array([0, len(of_text)], pa.int32()), places))
    return pa.Table.from_arrays(arrays, schema=columns)
