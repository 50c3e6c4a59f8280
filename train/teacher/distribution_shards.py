"""The target's distributions on its completions, as a cache holds them: drafts train on them with no target in memory.

Of each loss position a shard has what `CachedDistributions` has, at the temperature, top-k and top-p of the deployment:
the k tokens say nothing of the tail's mass at another temperature.

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
from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.distributions import CachedDistributions, LiveDistributions
from draftsmith.train.losses.output_head import OutputHead, head_of, last_hidden
from draftsmith.train.teacher.cache_config import CacheConfig
from draftsmith.train.teacher.sources import Source, Text, batches_of, padded

SCHEMA = "draftsmith.teacher/1"
COLUMNS = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.int64()),  # a checksum of the sample's tokens and loss mask
        ("ids", pa.list_(pa.int32())),  # k of each loss position, one position behind the other
        ("log_p", pa.list_(pa.float16())),
        ("log_tail", pa.list_(pa.float32())),
        ("log_p_of_text", pa.list_(pa.float32())),  # replay needs it exactly
    ]
)
NUMBERS = {"ids": torch.int32, "log_p": torch.float16, "log_tail": torch.float32, "log_p_of_text": torch.float32}
# Samples that are read together: a sample alone takes 8 % more bytes, a shard as a whole 5 times as long to read.
ROW_GROUP = 8
SAMPLER = ("temperature", "top_k", "top_p")


def distribution_bytes(k: int) -> int:
    """Return the bytes of a position's distribution, uncompressed."""
    return 6 * k + 8


@dataclass(frozen=True)
class DistributionShards:
    """How a cache of distributions is written."""

    config: CacheConfig
    vocab_size: int
    """Of the target's tokenizer."""

    schema = SCHEMA
    title = "teacher cache"
    way_out = "free some space or give a smaller --k"
    sample_bytes = 512
    """What Parquet says of each sample, at most."""
    checked = None
    """The columns that say whether a shard that is there is whole: all of them."""

    def __post_init__(self) -> None:
        if self.config.k > self.vocab_size:
            raise InputError(f"k: expected at most the target's {self.vocab_size} tokens, found {self.config.k}")

    @property
    def columns(self) -> pa.Schema:
        """Those of a shard."""
        return COLUMNS

    @property
    def settings(self) -> dict[str, Any]:
        """What determines every number, beside the target and the texts."""
        return {name: getattr(self.config, name) for name in ("k", *SAMPLER)}

    @property
    def position_bytes(self) -> int:
        """Bytes of a position, uncompressed."""
        return distribution_bytes(self.config.k)

    @property
    def shape(self) -> str:
        """What they depend on, for the estimate."""
        return f"at k={self.config.k}"

    def positions(self, text: Text) -> int:
        """Return of how many positions of a text there is something: of each that predicts a token to learn."""
        return sum(text[2][1:])

    def write(
        self, path: Path, source: Source, texts: list[Text], model: PreTrainedModel, done: Callable[[int], Any]
    ) -> None:
        """Compute a shard and write it whole.

        Args:
            path: where.
            source: what it is of.
            texts: the source's.
            model: the target.
            done: told of how many samples more have been computed.

        Raises:
            InputError: numbers that are no distributions.
            OSError: the disk is full, or cannot be written; nothing is left behind.
        """
        config = self.config
        sampler = Sampler.of(config.temperature, config.top_k, config.top_p)
        head = head_of(model).cut(self.vocab_size)
        distributions: dict[int, CachedDistributions] = {}
        for rows in batches_of(texts, config.batch_size):
            batch = [texts[i][1:] for i in rows]
            distributions.update(zip(rows, distributions_of(model, head, batch, sampler, config.k), strict=True))
            for i in rows:
                if distributions[i].log_p_of_text.isnan().any():
                    raise InputError(
                        f"target: expected finite logits, found none in sample {texts[i][0]!r} of "
                        f"{source.completions}; try another --dtype than {config.dtype}"
                    )
            done(len(rows))
        _write_shard(path, source, [distributions[i] for i in range(len(texts))])


@torch.inference_mode()
def distributions_of(
    model: PreTrainedModel, head: OutputHead, texts: Sequence[tuple[list[int], list[int]]], sampler: Sampler, k: int
) -> list[CachedDistributions]:
    """Return the distributions of a target on some texts, computed together.

    Logits are never held for more positions than `ChunkSizes` allows.

    Args:
        model: the target.
        head: its head, cut to its tokens.
        texts: B of (token ids, loss mask). A distribution is taken before each token with mask 1, but for a first one.
        sampler: the deployment's warping.
        k: as in `CachedDistributions`.

    Returns:
        B distributions on the CPU.
    """
    ids_BT, mask_BT = (padded([text[part] for text in texts], model.device) for part in (0, 1))
    chosen_BT = mask_BT[:, 1:].bool()
    positions = own_positions(model, [len(ids) for ids, _ in texts], ids_BT)
    # Padding stands behind the texts, where they do not look.
    hidden_BTH = last_hidden(model, input_ids=ids_BT, **positions)
    teacher = LiveDistributions(hidden_BTH[:, :-1][chosen_BT], head)
    labels_N, vocab_size, sizes = ids_BT[:, 1:][chosen_BT], len(head.weight), ChunkSizes.of(model.device)
    kept = []
    for at in sizes.chunks(len(labels_N), vocab_size):
        logits_of, labels_C = teacher.chunk(at), labels_N[at]
        for part in sizes.parts(len(labels_C), vocab_size):
            kept.append(CachedDistributions.of(logits_of(part), labels_C[part], sampler, k).to("cpu"))
    whole = CachedDistributions.concatenated(kept)
    return [whole[start:end] for start, end in pairwise([0, *chosen_BT.sum(1).cumsum(0).tolist()])]


def _write_shard(path: Path, source: Source, distributions: list[CachedDistributions]) -> None:
    names, checksums = zip(*source.samples, strict=True)
    columns: list[Any] = [names, checksums]
    for name, dtype in NUMBERS.items():
        columns.append([getattr(each, name).to(dtype).flatten().numpy() for each in distributions])
    shard = pa.table([pa.array(c, field.type) for c, field in zip(columns, COLUMNS, strict=True)], schema=COLUMNS)
    # Bytes of one significance lie together; of token ids, too, the high ones are mostly zero.
    together = [f"{name}.list.element" for name in NUMBERS]
    options = {"use_dictionary": False, "use_byte_stream_split": together, "write_statistics": False}
    write_shard(path, shard, row_group_size=ROW_GROUP, **options)
