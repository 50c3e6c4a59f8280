"""A teacher on disk: a target's distributions on its completions; a draft trains on them with no target in memory.

A directory holds `manifest.json` (`"draftsmith.teacher/1"`: what determines every number) and one Parquet shard for
each shard of completions. Of each loss position it has what `CachedDistributions` has, at the temperature, top-k and
top-p of the deployment: the k tokens say nothing of the tail's mass at another temperature. A shard is written aside
and renamed, so that a run that was killed goes on where it stopped.

Shape suffixes: B texts, T positions of a text, N positions (C of a chunk), H hidden.
"""

import hashlib
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.decode.sampling import Sampler
from draftsmith.train import models
from draftsmith.train.data.mapped import checksum
from draftsmith.train.data.shards import (
    MANIFEST,
    completion_files,
    output_directory,
    read_completions,
    read_shard,
    settle_manifest,
    write_shard,
)
from draftsmith.train.job.processes import Processes, launched
from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.output_head import OutputHead, head_of, last_hidden, require_split
from draftsmith.train.models import (
    check_head,
    load_model,
    load_tokenizer,
    named_device,
    resolve_dtype,
    tokenizer_size,
)
from draftsmith.train.teacher.cache_config import CacheConfig as CacheConfig
from draftsmith.train.teacher.distributions import CachedDistributions, LiveDistributions

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

logger = logging.getLogger(__name__)


@dataclass
class CacheSummary:
    """What a run of `make_cache` read and wrote."""

    output: Path
    """The directory of the cache."""
    samples: int = 0
    """Samples of the completions."""
    kept: int = 0
    """Samples whose distributions were there before."""
    written: int = 0
    """Samples whose distributions this run wrote."""
    positions: int = 0
    """Loss positions of the samples that are there now, each with a distribution."""
    size: int = 0
    """Bytes of their shards."""
    positions_written: int = 0
    """Loss positions of those that this run wrote."""
    seconds: float = 0.0
    """Time this run spent computing and writing."""

    @classmethod
    def over(cls, parts: Sequence["CacheSummary"]) -> "CacheSummary":
        """Add up what several processes wrote for the same samples."""
        whole = CacheSummary(parts[0].output, seconds=max(part.seconds for part in parts))
        for name in ("samples", "kept", "written", "positions", "size", "positions_written"):
            setattr(whole, name, sum(getattr(part, name) for part in parts))
        return whole

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes on disk for a loss position; None where there is none."""
        return self.size / self.positions if self.positions else None


@dataclass(frozen=True)
class _Source:
    """A shard of completions, and the cache shard that it becomes."""

    completions: Path
    name: str
    samples: tuple[tuple[str, int], ...]
    """Ids and checksums."""
    positions: int


def make_cache(config: CacheConfig) -> CacheSummary:
    """Write the target's distributions on all samples of the completions, and skip the shards that are there.

    Of several processes that were launched together, each writes its share of the shards.

    Returns:
        What was written and kept, by all processes.

    Raises:
        InputError: a target or completions that cannot be used, a directory of other settings or inputs, less free
            space than the estimate, or a disk that is full after all (what was written is kept).
    """
    with launched() as processes:
        config.require_own_device(processes.count)
        return _make_cache(config, processes)


def _make_cache(config: CacheConfig, processes: Processes) -> CacheSummary:
    """Write this process's share; return what all have written, once they have."""
    code, device = config.trust_remote_code, named_device(config.target_device)
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=code)
    dtype = resolve_dtype(config.dtype, config.target, device=device, trust_remote_code=code)
    config, vocab_size = replace(config, dtype=dtype), tokenizer_size(tokenizer)
    if config.k > vocab_size:
        raise InputError(f"k: expected at most the target's {vocab_size} tokens, found {config.k}")
    output = Path(config.output)
    files = [(number, file) for number, path in enumerate(config.completions) for file in completion_files(path)]
    sources = [_source(number, file) for number, file in processes.share(files)]
    summary = CacheSummary(output, sum(len(source.samples) for source in sources))
    with output_directory(
        output, lambda: f"{summary.kept + summary.written} of {summary.samples} samples", processes.first
    ):
        processes.after_the_first(lambda: settle_manifest(output, _manifest(config, vocab_size)))
        processes.require_shared(output / MANIFEST)
        missing = []
        for source in sources:
            shard = read_shard(output / source.name, COLUMNS)
            if shard is not None and samples_of(shard) == source.samples:
                summary.kept += len(source.samples)
                _count(summary, source)
            else:
                missing.append(source)
        if missing:
            _check_space(config, missing, processes)
            model = load_model(
                config.target,
                field="target",
                dtype=config.dtype,
                trust_remote_code=code,
                device=config.target_device,
                quantization=config.target_quantization,
            )
            check_head(model, tokenizer, "target")
            require_split(model, "target")
            _write(config, model, vocab_size, missing, summary, processes)
        return CacheSummary.over(processes.gathered(summary))


def _source(number: int, file: Path) -> _Source:
    texts = texts_of(file)
    positions = sum(sum(mask[1:]) for _, _, mask in texts)
    samples = tuple((name, checksum(ids, mask)) for name, ids, mask in texts)
    return _Source(file, f"{number:03d}-{file.name}", samples, positions)


def texts_of(file: Path) -> list[tuple[str, list[int], list[int]]]:
    """Read ids, tokens and loss masks of a shard of completions."""
    shard = read_completions(file)
    columns = (shard[name].to_pylist() for name in ("id", "input_ids", "loss_mask"))
    return list(zip(*columns, strict=True))


def samples_of(shard: pa.Table) -> tuple[tuple[str, int], ...]:
    """Return the id and the text's checksum of each sample that a shard has the distributions of."""
    return tuple(zip(shard["id"].to_pylist(), shard["text"].to_pylist(), strict=True))


def _count(summary: CacheSummary, source: _Source) -> None:
    summary.positions += source.positions
    summary.size += (summary.output / source.name).stat().st_size


def _check_space(config: CacheConfig, missing: list[_Source], processes: Processes) -> None:
    # Of all processes: the others' shares are much like this one's.
    positions = processes.count * sum(source.positions for source in missing)
    samples = processes.count * sum(len(source.samples) for source in missing)
    raw = 6 * config.k + 8
    # Without what compression saves, which is not known yet, and with what Parquet says of each sample.
    most = positions * raw + samples * 512
    free = shutil.disk_usage(config.output).free
    if processes.first:
        tqdm.write(
            f"teacher cache: {positions} positions × {raw} bytes at k={config.k}: at most {_megabytes(most)}, of "
            f"{_megabytes(free)} free"
        )
    if free < most:
        raise InputError(
            f"output: expected {_megabytes(most)} of free space for {config.output}, found {_megabytes(free)}; free "
            "some space or give a smaller --k"
        )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _write(
    config: CacheConfig,
    model: PreTrainedModel,
    vocab_size: int,
    missing: list[_Source],
    summary: CacheSummary,
    processes: Processes,
) -> None:
    """Compute the shards that are missing, samples of similar length together, and count them in the summary."""
    sampler, head = Sampler.of(config.temperature, config.top_k, config.top_p), head_of(model).cut(vocab_size)
    start = time.perf_counter()
    total = summary.kept + sum(len(source.samples) for source in missing)
    title = processes.title("cache")
    with tqdm(total=total, initial=summary.kept, unit="sample", desc=title, disable=not processes.first) as bar:
        for source in missing:
            texts = texts_of(source.completions)
            lengths = [len(ids) for _, ids, _ in texts]
            order = sorted(range(len(texts)), key=lengths.__getitem__, reverse=True)
            distributions: dict[int, CachedDistributions] = {}
            for at in range(0, len(order), config.batch_size):
                rows = order[at : at + config.batch_size]
                batch = [texts[i][1:] for i in rows]
                distributions.update(zip(rows, distributions_of(model, head, batch, sampler, config.k), strict=True))
                for i in rows:
                    if distributions[i].log_p_of_text.isnan().any():
                        raise InputError(
                            f"target: expected finite logits, found none in sample {texts[i][0]!r} of "
                            f"{source.completions}; try another --dtype than {config.dtype}"
                        )
                bar.update(len(rows))
            _write_shard(summary.output / source.name, source, [distributions[i] for i in range(len(texts))])
            summary.written += len(texts)
            summary.positions_written += source.positions
            summary.seconds = time.perf_counter() - start
            _count(summary, source)


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
    ids_BT, mask_BT = (
        torch.nn.utils.rnn.pad_sequence([torch.tensor(text[part]) for text in texts], batch_first=True).to(model.device)
        for part in (0, 1)
    )
    chosen_BT = mask_BT[:, 1:].bool()
    hidden_BTH = last_hidden(model, input_ids=ids_BT)  # padding stands behind the texts, where they do not look
    teacher = LiveDistributions(hidden_BTH[:, :-1][chosen_BT], head)
    labels_N, vocab_size, sizes = ids_BT[:, 1:][chosen_BT], len(head.weight), ChunkSizes.of(model.device)
    kept = []
    for at in sizes.chunks(len(labels_N), vocab_size):
        logits_of, labels_C = teacher.chunk(at), labels_N[at]
        for part in sizes.parts(len(labels_C), vocab_size):
            kept.append(CachedDistributions.of(logits_of(part), labels_C[part], sampler, k).to("cpu"))
    whole = CachedDistributions.concatenated(kept)
    return [whole[start:end] for start, end in pairwise([0, *chosen_BT.sum(1).cumsum(0).tolist()])]


def _write_shard(path: Path, source: _Source, distributions: list[CachedDistributions]) -> None:
    names, checksums = zip(*source.samples, strict=True)
    columns: list[Any] = [names, checksums]
    for name, dtype in NUMBERS.items():
        columns.append([getattr(each, name).to(dtype).flatten().numpy() for each in distributions])
    shard = pa.table([pa.array(c, field.type) for c, field in zip(columns, COLUMNS, strict=True)], schema=COLUMNS)
    # Bytes of one significance lie together; of token ids, too, the high ones are mostly zero.
    together = [f"{name}.list.element" for name in NUMBERS]
    options = {"use_dictionary": False, "use_byte_stream_split": together, "write_statistics": False}
    write_shard(path, shard, row_group_size=ROW_GROUP, **options)


def _manifest(config: CacheConfig, vocab_size: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "settings": {name: getattr(config, name) for name in ("k", *SAMPLER, "dtype", "target_quantization")},
        "vocab_size": vocab_size,
        "target": {"path": config.target} | identity(config.target, config.trust_remote_code),
        "completions": [{"path": path, "sha256": digest(path)} for path in config.completions],
        "versions": {name: version(name) for name in ("draftsmith", "torch", "transformers")},
    }


def identity(target: str, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return what tells a target's distributions from another's: its config and weights, whatever it generates with."""
    files = models.identity(target, trust_remote_code=trust_remote_code)
    return {name: value for name, value in files.items() if name != "generation_config.json"}


def digest(completions: str) -> str:
    """Identify completions by their manifest, which determines every token of them."""
    try:
        return hashlib.sha256((Path(completions) / MANIFEST).read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(
            f"{completions}: expected completions written by draftsmith prepare, found no {MANIFEST}"
        ) from error
