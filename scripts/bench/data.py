"""The cost of reading completions: mapped on disk once, then opened by each process of each run.

    python -m draftsmith.scripts.bench.data --output runs/data --tokens 100000000

The completions are the embedded corpus over and over, each sample cut at another place. Processes of their own read
them, so that the memory of one is what a rank adds to that of its models.
"""

import json
import multiprocessing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pyarrow as pa
import torch
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from draftsmith.decode.clock import now
from draftsmith.scripts.bench.common import ASSETS, BenchmarkConfig, main
from draftsmith.train.data.collator import CompletionCollator
from draftsmith.train.data.corpus import stdlib_modules
from draftsmith.train.data.examples import TrainingData, training_examples
from draftsmith.train.data.mapped import DIRECTORY
from draftsmith.train.data.packing import pack
from draftsmith.train.data.sampler import EpochSampler
from draftsmith.train.data.shards import COLUMNS, MANIFEST, SCHEMA, write_shard
from draftsmith.train.files import remove
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import environment

SHARD = 64
PROMPT = 32
START = "spawn"
"""How the processes that read begin."""


@dataclass(kw_only=True)
class BenchDataConfig(BenchmarkConfig):
    """Time how completions become batches."""

    output: str = "runs/data-bench"
    """Receives the completions, which a second run takes again, and data.json."""
    tokens: int = 100_000_000
    """Tokens of all samples together."""
    sample_tokens: int = 400
    """Tokens of a sample, on average: from a tenth to nearly twice as many."""
    max_length: int = 2048
    """Tokens of a packed row."""
    batch_size: int = 8
    """Rows of a batch."""
    batches: int = 200
    """Batches that are timed."""

    def figures_path(self) -> Path:
        """Return where the figures are written."""
        return Path(self.output) / "data.json"


def write_completions(config: BenchDataConfig, directory: Path) -> None:
    """Write samples of the standard library's tokens, as `prepare` would."""
    corpus = _corpus(max(config.tokens, 2 * config.sample_tokens))
    generator, written, number = np.random.default_rng(0), 0, 0
    directory.mkdir(parents=True)
    with tqdm(total=config.tokens, unit="token", unit_scale=True, desc="write") as bar:
        while written < config.tokens:
            sizes = generator.integers(config.sample_tokens // 10 + PROMPT, config.sample_tokens * 19 // 10, SHARD)
            starts, ends = generator.integers(0, len(corpus) - sizes.max(), SHARD), np.append(0, sizes.cumsum())
            ids = np.concatenate([corpus[start : start + size] for start, size in zip(starts, sizes, strict=True)])
            mask = np.arange(len(ids)) - np.repeat(ends[:-1], sizes) >= PROMPT
            columns = [
                [f"{number * SHARD + sample}" for sample in range(SHARD)],
                pa.nulls(SHARD, pa.string()),
                np.full(SHARD, PROMPT, np.int32),
                pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(ids, pa.int32())),
                pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(mask.astype(np.int8))),
                ["length"] * SHARD,
            ]
            write_shard(directory / f"shard-{number:05d}.parquet", pa.table(columns, schema=COLUMNS))
            number, written = number + 1, written + len(ids)
            bar.update(len(ids))
    manifest = {"schema": SCHEMA, "settings": {}, "target": {}, "versions": {}, "shards": number}
    (directory / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def _corpus(tokens: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return the tokens of the standard library, (N,): of all its modules, or of the first that have as many."""
    encode, modules, count = load_tokenizer(ASSETS / "tiny-target"), list[list[int]](), 0
    for module in stdlib_modules():
        if count >= tokens:
            break
        modules.append(encode(module.source, verbose=False)["input_ids"])
        count += len(modules[-1])
    return np.concatenate(modules)


def read(config: BenchDataConfig, directory: str) -> dict[str, float]:
    """Open completions as a rank does, and take batches; return what that took in a process of its own."""
    process = psutil.Process()
    before, start = process.memory_info(), now()
    data: TrainingData = training_examples([directory], config.max_length)
    opened = now()
    data = pack(data, config.max_length)
    packed = now()
    sampler = EpochSampler(data, seed=0, group_size=config.batch_size)
    collate = CompletionCollator(load_tokenizer(ASSETS / "tiny-target"))
    loader = iter(DataLoader(data, config.batch_size, sampler=sampler, collate_fn=collate))  # type: ignore[arg-type]
    next(loader)
    first = now()
    counts = [batch["input_ids"].numel() for batch in islice(loader, config.batches)]
    end, after = now(), process.memory_info()
    return {
        "samples": len(data.members),
        "rows": len(data),
        "filled": float(data.lengths.sum()) / (len(data) * config.max_length),
        "open_seconds": opened - start,
        "pack_seconds": packed - opened,
        "first_batch_seconds": first - start,
        "batch_tokens_per_second": sum(counts) / (end - first),
        "resident_memory_mb": (after.rss - before.rss) / 1e6,
        "of_these_in_mapped_files_mb": (after.shared - before.shared) / 1e6,
    }


def bench(config: BenchDataConfig) -> dict[str, Any]:
    """Time the first reading and the next; return seconds, tokens per second and memory."""
    directory = Path(config.output) / "completions"
    if not (directory / MANIFEST).is_file():
        remove(directory)
        write_completions(config, directory)
    remove(directory / DIRECTORY)
    figures = {}
    for name in ("first", "mapped"):
        with multiprocessing.get_context(START).Pool(1) as pool:
            figures[name] = pool.apply(read, (config, str(directory)))
    tokens = config.tokens / (figures["first"]["open_seconds"] - figures["mapped"]["open_seconds"])
    return {"environment": environment(torch.device("cpu"), "int32"), **figures, "mapped_tokens_per_second": tokens}


if __name__ == "__main__":
    main(BenchDataConfig, bench)
