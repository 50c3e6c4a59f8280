"""Writing a teacher cache, from which drafts and heads train with no target in memory.

A directory holds `manifest.json`, with all settings that determine the numbers, and a Parquet shard for each shard of
completions (`distribution_shards`, `feature_shards`). Shards are written atomically, so a killed run resumes at the
first missing one.
"""

import hashlib
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draftsmith.decode.cache.features import last_norm
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase, track
from draftsmith.train import files
from draftsmith.train.data.mapped import text_hash
from draftsmith.train.data.shards import MANIFEST, completion_files, output_directory, read_shard, settle_manifest
from draftsmith.train.job.processes import Processes, join_launched
from draftsmith.train.losses.output_head import require_split
from draftsmith.train.models import check_head, load_config, load_model, load_tokenizer, resolve_dtype
from draftsmith.train.teacher.cache_config import CacheConfig as CacheConfig
from draftsmith.train.teacher.distribution_shards import DistributionShards
from draftsmith.train.teacher.feature_shards import FeatureShards, States, live_states
from draftsmith.train.teacher.served import ServedModel, ServedTarget, urls_of
from draftsmith.train.teacher.served_check import ask_servers, compare_states, require_length, require_served
from draftsmith.train.teacher.sources import Source, texts_of
from draftsmith.train.teacher.target_ends import read_ends

Shards = DistributionShards | FeatureShards

logger = logging.getLogger(__name__)


@dataclass
class CacheSummary:
    """Counts of a run of `make_cache`.

    Of all `samples` of the completions, `kept` were in earlier shards and `written` are new. `positions` and `size`
    (bytes) are those of all shards now, `positions_written` those of this run, which took `seconds`.
    """

    output: Path
    title: str
    samples: int = 0
    kept: int = 0
    written: int = 0
    positions: int = 0
    size: int = 0
    positions_written: int = 0
    seconds: float = 0.0

    @classmethod
    def over(cls, parts: Sequence["CacheSummary"]) -> "CacheSummary":
        """Add up the summaries of several processes."""
        whole = CacheSummary(parts[0].output, parts[0].title, seconds=max(part.seconds for part in parts))
        for name in ("samples", "kept", "written", "positions", "size", "positions_written"):
            setattr(whole, name, sum(getattr(part, name) for part in parts))
        return whole

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes on disk for each position; None without positions."""
        return self.size / self.positions if self.positions else None


def make_cache(config: CacheConfig) -> CacheSummary:
    """Write a cache, except the shards that exist, and return the counts over all processes.

    Processes that were launched together share the shards. Space that runs out raises InputError, before the run by an
    estimate, or during it, when finished shards are kept.
    """
    with join_launched() as processes:
        return _make_cache(config, processes)


def _make_cache(config: CacheConfig, processes: Processes) -> CacheSummary:
    """Write this process's share of the shards, and return the counts over all processes."""
    code = config.trust_remote_code
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=code)
    model_config = load_config(config.target, field="target", trust_remote_code=code)
    check_head(model_config, tokenizer, "target")
    served = None
    if config.teacher:
        served = ask_servers(urls_of(config.teacher), config.target, code)
        if config.dtype not in ("auto", served.dtype):
            raise InputError(f"dtype: expected auto or {served.dtype}, as the servers compute, found {config.dtype}")
        config = replace(config, dtype=served.dtype, feature_dtype=config.feature_dtype or served.feature_dtype)
    else:
        dtype = resolve_dtype(config.dtype, config.target, trust_remote_code=code)
        config = replace(config, dtype=dtype)
    vocab_size, size = token_count(tokenizer, model_config), model_config.get_text_config().vocab_size
    shards: Shards = FeatureShards.of(config) if config.features else DistributionShards(config, vocab_size)
    if served is not None and isinstance(shards, FeatureShards):
        require_served(served, urls_of(config.teacher)[0], model_config, shards.layout.layer_ids)
    output, manifest = Path(config.output), _manifest(config, shards, vocab_size, served)
    files = [file for path in config.completions for file in completion_files(path)]
    sources = [_source(file, shards, size) for file in track(processes.share(files), "reading", "shards")]
    if served is not None:
        longest = max((source.longest for source in sources), default=0)
        require_length(served, longest)
    summary = CacheSummary(output, shards.title, sum(len(source.samples) for source in sources))
    with output_directory(
        output, lambda: f"{summary.kept + summary.written} of {summary.samples} samples", processes.first
    ):
        processes.after_the_first(lambda: settle_manifest(output, manifest))
        processes.require_shared(output / MANIFEST)
        missing = []  # a shard's name tells its texts: one of others is written next to it
        for source in track(sources, "shards that are there", "shards"):
            checked = shards.checked and list(shards.checked)
            if read_shard(output / source.name, shards.columns, columns=checked) is not None:
                summary.kept += len(source.samples)
                _count(summary, source)
            else:
                missing.append(source)
        works = bool(missing)
        if served is not None:  # the first process compares states for all
            works = any(processes.gathered(works))
        if works:
            needed = _estimate(config, shards, missing, processes)
            with _teacher(config, served, processes, sources) as teacher:
                if processes.first and missing:
                    print(f"{shards.title}: {needed}")
                _write(shards, teacher, missing, summary, processes)
        return CacheSummary.over(processes.gathered(summary))


@contextmanager
def _teacher(
    config: CacheConfig, served: ServedModel | None, processes: Processes, sources: Sequence[Source]
) -> Iterator[Any]:
    """Yield what gives the numbers; servers' states of some texts are compared with the target first."""
    code = config.trust_remote_code
    if served is None:
        options: dict[str, Any] = {"dtype": config.dtype, "trust_remote_code": code}
        model = load_model(config.target, field="target", quantization=config.target_quantization, **options)
        require_split(model, "target")
        yield partial(live_states, model, config.batch_size) if config.features else model
        return
    urls = urls_of(config.teacher)
    with phase(f"reading the ends of {config.target}"):
        ends = read_ends(config.target, config.dtype, trust_remote_code=code)

    def compare() -> None:
        texts = [ids for _, ids, _ in texts_of(sources[0].completions)]
        compare_states(urls, config.target, ends, texts, code)

    processes.after_the_first(compare)
    with ServedTarget(urls, last_norm(ends), served=served) as teacher:
        yield teacher


def _source(file: Path, shards: Shards, vocab_size: int) -> Source:
    texts = texts_of(file, vocab_size)
    if not texts:
        raise InputError(f"{file}: expected samples, found none")
    samples = tuple((name, text_hash(ids, mask)) for name, ids, mask in texts)
    positions, longest = sum(shards.positions(text) for text in texts), max(len(ids) for _, ids, _ in texts)
    name = f"{file.parent.name}-{file.stem}-{hashlib.sha256(repr(samples).encode()).hexdigest()[:16]}.parquet"
    return Source(file, name, samples, positions, longest)


def _count(summary: CacheSummary, source: Source) -> None:
    summary.positions += source.positions
    summary.size += (summary.output / source.name).stat().st_size


def _estimate(config: CacheConfig, shards: Shards, missing: list[Source], processes: Processes) -> str:
    """Return a line about the most disk space that the missing shards take, and require that it is free."""
    # The shares of all processes are about equal.
    positions = processes.count * sum(source.positions for source in missing)
    samples = processes.count * sum(len(source.samples) for source in missing)
    # An upper bound: the savings of compression are not known yet.
    most = positions * shards.position_bytes + samples * shards.sample_bytes
    free = shutil.disk_usage(config.output).free
    if free < most:
        space = f"{_megabytes(most)} of free space for {config.output}, found {_megabytes(free)}"
        raise InputError(f"output: expected {space}; {shards.remedy}")
    size = f"{positions} positions × {shards.position_bytes} bytes {shards.shape}"
    return f"{size}: at most {_megabytes(most)}, of {_megabytes(free)} free"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _write(shards: Shards, teacher: Any, missing: list[Source], summary: CacheSummary, processes: Processes) -> None:
    """Write the missing shards, and count them in the summary."""
    start = time.perf_counter()
    total = summary.kept + sum(len(source.samples) for source in missing)
    if isinstance(teacher, ServedTarget):
        assert isinstance(shards, FeatureShards)
        texts = (ids for source in missing for _, ids, _ in texts_of(source.completions))
        teacher = partial(_next_states, teacher.states(shards.layout, texts))
    with phase(processes.title("cache"), total, "samples", summary.kept) as bar:
        for source in missing:
            shards.write(summary.output / source.name, source, texts_of(source.completions), teacher, bar.advance)
            summary.written += len(source.samples)
            summary.positions_written += source.positions
            summary.seconds = time.perf_counter() - start
            _count(summary, source)


def _next_states(stream: States, layout: Any, texts: Sequence[list[int]]) -> States:
    """Yield the states of a shard's texts, the next of a stream over all, so that no server is idle between shards."""
    for number, (_, states) in zip(range(len(texts)), stream, strict=False):
        yield [number], states


def _manifest(config: CacheConfig, shards: Shards, vocab_size: int, served: ServedModel | None) -> dict[str, Any]:
    quantization = config.target_quantization if served is None else served.quantization
    vllm = {} if served is None else {"vllm": served.vllm}
    return {
        "schema": shards.schema,
        "settings": shards.settings | {"dtype": config.dtype, "target_quantization": quantization},
        "vocab_size": vocab_size,
        "target": {"path": config.target} | identity(config.target),
        "versions": {name: version(name) for name in ("draftsmith", "torch", "transformers")} | vllm,
    }


def identity(target: str) -> dict[str, Any]:
    """Return the fingerprint of a target's distributions: its config and weights, without its generation config."""
    found = files.identity(target)
    return {name: value for name, value in found.items() if name != "generation_config.json"}
