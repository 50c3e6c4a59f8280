"""Cache shards of the target's distributions on its completions.

A shard holds the `CachedDistributions` of each loss position, at the temperature, top-k and top-p of the deployment:
the tail's mass at another temperature does not follow from the k tokens.

Shape suffixes: B texts, T positions of a text, N positions (C of a chunk), H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from transformers import PreTrainedModel

from draftsmith.decode.cache import own_positions
from draftsmith.decode.errors import InputError
from draftsmith.decode.sampling import Sampler
from draftsmith.train.data.shards import write_shard
from draftsmith.train.losses.chunked import ChunkSizes
from draftsmith.train.losses.distributions import CachedDistributions, LiveDistributions
from draftsmith.train.losses.output_head import OutputHead, head_of, last_hidden
from draftsmith.train.teacher.cache_config import CacheConfig
from draftsmith.train.teacher.sources import Source, Text, batches_of, pad_rows

SCHEMA = "draftsmith.teacher/2"
COLUMNS = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.uint64()),  # a hash of the sample's tokens and loss mask
        ("ids", pa.list_(pa.int32())),  # k for each loss position, position by position
        ("log_p", pa.list_(pa.float16())),
        ("log_tail", pa.list_(pa.float32())),
        ("log_p_of_text", pa.list_(pa.float32())),  # in float32: replay divides by it
    ]
)
NUMBERS = {"ids": torch.int32, "log_p": torch.float16, "log_tail": torch.float32, "log_p_of_text": torch.float32}
# Samples in a row group: single samples take 8 % more bytes, and whole shards 5 times as long to read.
ROW_GROUP = 8
SAMPLER = ("temperature", "top_k", "top_p")


@dataclass(frozen=True)
class DistributionShards:
    """The writer of a cache of distributions.

    `sample_bytes` bounds Parquet's overhead for a sample. `checked` are the columns to read for a check that an
    existing shard is complete; None for all.
    """

    config: CacheConfig
    vocab_size: int

    schema = SCHEMA
    title = "teacher cache"
    remedy = "free some space or give a smaller --k"
    sample_bytes = 512
    checked = None
    columns = COLUMNS

    def __post_init__(self) -> None:
        if self.config.k > self.vocab_size:
            raise InputError(f"k: expected at most the target's {self.vocab_size} tokens, found {self.config.k}")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that determine all numbers, in addition to the target and the texts."""
        return {name: getattr(self.config, name) for name in ("k", *SAMPLER)}

    @property
    def position_bytes(self) -> int:
        """Uncompressed bytes of a position."""
        return 6 * self.config.k + 8

    @property
    def shape(self) -> str:
        """The settings that the size depends on, in words."""
        return f"at k={self.config.k}"

    def positions(self, text: Text) -> int:
        """Return the number of cached positions of a text: those that predict a token to learn."""
        return sum(text[2][1:])

    def write(
        self, path: Path, source: Source, texts: list[Text], model: PreTrainedModel, done: Callable[[int], Any]
    ) -> None:
        """Compute and write the shard of a source; call `done` with the number of samples of each batch."""
        config = self.config
        sampler = Sampler.of(config.temperature, config.top_k, config.top_p)
        head = head_of(model).cut(self.vocab_size)
        distributions: dict[int, CachedDistributions] = {}
        for rows in batches_of([ids for _, ids, _ in texts], config.batch_size):
            batch = [texts[i][1:] for i in rows]
            distributions.update(zip(rows, distributions_of(model, head, batch, sampler, config.k), strict=True))
            for i in rows:
                if distributions[i].log_p_of_text.isnan().any():
                    where = f"sample {texts[i][0]!r} of {source.completions}; try another --dtype than {config.dtype}"
                    raise InputError(f"target: expected finite logits, found none in {where}")
            done(len(rows))
        _write_shard(path, source, [distributions[i] for i in range(len(texts))])


@torch.inference_mode()
def distributions_of(
    model: PreTrainedModel, head: OutputHead, texts: Sequence[tuple[list[int], list[int]]], sampler: Sampler, k: int
) -> list[CachedDistributions]:
    """Return the target's distributions on a batch of texts, (token ids, loss mask) pairs, on the CPU.

    A distribution is taken before each token with mask 1, except the first. `head` is cut to the target's tokens.
    """
    ids_BT, mask_BT = (pad_rows([text[part] for text in texts], model.device) for part in (0, 1))
    chosen_BT = mask_BT[:, 1:].bool()
    positions = own_positions(model, [len(ids) for ids, _ in texts], ids_BT)
    # Padding follows the texts, so causal attention never reads it.
    hidden_BTH = last_hidden(model, input_ids=ids_BT, **positions)
    teacher = LiveDistributions(hidden_BTH[:, :-1][chosen_BT], head)
    labels_N, vocab_size, sizes = ids_BT[:, 1:][chosen_BT], len(head.weight), ChunkSizes.of(model.device)
    kept = []  # in chunks: the logits of all positions would not fit into memory
    for at in sizes.chunks(len(labels_N), vocab_size):
        logits_of, labels_C = teacher.chunk(at), labels_N[at]
        for part in sizes.parts(len(labels_C), vocab_size):
            kept.append(CachedDistributions.of(logits_of(part), labels_C[part], sampler, k).to("cpu"))
    whole = CachedDistributions.concatenated(kept)
    return [whole[start:end] for start, end in pairwise([0, *chosen_BT.sum(1).cumsum(0).tolist()])]


def _write_shard(path: Path, source: Source, distributions: list[CachedDistributions]) -> None:
    names, hashes = zip(*source.samples, strict=True)
    columns: list[Any] = [names, hashes]
    for name, dtype in NUMBERS.items():
        columns.append([getattr(sample, name).to(dtype).flatten().numpy() for sample in distributions])
    shard = pa.table([pa.array(c, field.type) for c, field in zip(columns, COLUMNS, strict=True)], schema=COLUMNS)
    # Byte streams put bytes of one significance together, which compress well: high bytes of ids are mostly zero.
    together = [f"{name}.list.element" for name in NUMBERS]
    options = {"use_dictionary": False, "use_byte_stream_split": together, "write_statistics": False}
    write_shard(path, shard, row_group_size=ROW_GROUP, **options)
