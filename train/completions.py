"""Completions that the target writes itself: the text that a draft is distilled on, because it is what it will draft.

An output directory holds `manifest.json` (`"draftsmith.completions/1"`: the settings and inputs that determine every
token) and one Parquet shard a batch. A shard is written aside and renamed, and a batch is seeded by its own index, so
a run that was killed goes on where it stopped and ends with the bytes that an uninterrupted run writes.
"""

import errno
import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.errors import InputError
from draftsmith.decode.text import count_repeated_ngrams
from draftsmith.train.models import DTYPES, load_model, load_tokenizer
from draftsmith.train.prompts import Prompt, encode_prompt, read_prompts
from draftsmith.train.shards import COLUMNS, SCHEMA, read_manifest, read_shard, settle_manifest, write_shard

logger = logging.getLogger(__name__)


@dataclass
class PrepareConfig:
    """Let the target complete prompts, and keep what it wrote for a draft to learn from; resumable."""

    target: str
    """The target model: a directory or a hub id."""
    prompts: str
    """A .jsonl, .json, .parquet or text file of prompts, a directory, or a hub id (`NAME` or `NAME:CONFIG`)."""
    output: str
    """The directory that receives the completions; an unfinished one is resumed."""
    split: str = "train"
    """The split of a directory or hub id."""
    limit: int | None = None
    """Read the first so many prompts only."""
    max_prompt_tokens: int | None = None
    """Keep the last so many tokens of a longer prompt."""
    max_new_tokens: int = 128
    """Tokens of a completion at most."""
    temperature: float = 1.0
    """Sample at this temperature; 0 takes the most likely token each time."""
    top_k: int = 0
    """Sample among the k most likely tokens only; 0 for all."""
    top_p: float = 1.0
    """Sample among the most likely tokens that hold this much probability; 1 for all."""
    batch_size: int = 16
    """Prompts completed together, of similar length; also the samples in a shard, and the unit of a resume."""
    seed: int = 0
    """Seeds the sampling."""
    dtype: str = "float32"
    """The target's weights and arithmetic: float32, bfloat16, float16 or float64."""
    trust_remote_code: bool = False
    """Run model code that the target's repository ships."""

    def __post_init__(self) -> None:
        for name in ("limit", "max_prompt_tokens", "max_new_tokens", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}: expected at least 1, found {value}")
        for name in ("top_k", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}: expected 0 or more, found {getattr(self, name)}")
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature: expected a finite number, 0 or more, found {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p: expected more than 0 and at most 1, found {self.top_p}")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, found {self.dtype!r}")


# What decides the tokens, named one by one when a run is resumed with others. Prompts and target are compared by
# content instead, because files may move.
SETTINGS = tuple(
    field.name
    for field in fields(PrepareConfig)
    if field.name not in {"target", "prompts", "output", "trust_remote_code"}
)


@dataclass
class CompletionsSummary:
    """What a run of `prepare` found and wrote; the counts of tokens and n-grams are over written and kept samples."""

    output: Path
    """The directory of the completions."""
    prompts: int
    """Prompts read."""
    written: int = 0
    """Completions written by this run."""
    kept: int = 0
    """Completions kept from before."""
    empty: int = 0
    """Completions that are an end-of-sequence token and nothing else; they are samples all the same."""
    cut: int = 0
    """Completions that reached `max_new_tokens` without an end-of-sequence token."""
    tokens: int = 0
    """Tokens of all completions, end-of-sequence tokens included."""
    tokens_written: int = 0
    """Tokens of the completions that this run wrote."""
    seconds: float = 0.0
    """Time this run spent generating and writing."""
    repeated_ngrams: int = 0
    """4-grams that occurred earlier in their completion."""
    ngrams: int = 0
    """4-grams of all completions."""

    @property
    def repeated_ngram_share(self) -> float | None:
        """Repeated 4-grams over all 4-grams: high where the target loops; None where there are none."""
        return self.repeated_ngrams / self.ngrams if self.ngrams else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that this run wrote over its seconds; None where it wrote none."""
        return self.tokens_written / self.seconds if self.tokens_written else None

    def add(self, shard: pa.Table) -> None:
        """Count a shard's tokens, n-grams and ways to end."""
        columns = (shard[name].to_pylist() for name in ("input_ids", "prompt_length", "finish_reason"))
        for ids, prompt_length, finish_reason in zip(*columns, strict=True):
            completion = ids[prompt_length:]
            repeated, total = count_repeated_ngrams(completion)
            self.tokens += len(completion)
            self.repeated_ngrams += repeated
            self.ngrams += total
            self.cut += finish_reason == "length"
            self.empty += finish_reason == "stop" and len(completion) == 1


@dataclass(frozen=True)
class Batch:
    """Prompts that are completed together, and the shard that they become."""

    index: int
    prompts: list[Prompt]
    prompt_ids: list[list[int]]

    @property
    def shard(self) -> str:
        """The name of the shard's file."""
        return f"shard-{self.index:05d}.parquet"


def prepare(config: PrepareConfig) -> CompletionsSummary:
    """Complete every prompt with the target, one shard a batch, and skip the shards that an earlier run left.

    Returns:
        What was written and kept.

    Raises:
        InputError: prompts or target that cannot be used, an output directory of other settings or inputs (the message
            names the first), or a full disk (what was written so far is kept).
    """
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    prompts = read_prompts(config.prompts, split=config.split, limit=config.limit)
    encoded = [encode_prompt(prompt, tokenizer, max_tokens=config.max_prompt_tokens) for prompt in prompts]
    batches = make_batches(prompts, encoded, config.batch_size)
    _check_context(config, batches[0])

    output = Path(config.output)
    summary = CompletionsSummary(output, len(prompts))
    try:
        output.mkdir(parents=True, exist_ok=True)
        for leftover in output.glob(".*.partial"):
            leftover.unlink()
        settle_manifest(output, _manifest(config, prompts, encoded, len(batches)))
        missing = []
        for batch in batches:
            shard = read_shard(output / batch.shard)
            if shard is not None and shard["id"].to_pylist() == [prompt.id for prompt in batch.prompts]:
                summary.add(shard)
                summary.kept += len(batch.prompts)
            else:
                missing.append(batch)
        if missing:
            _complete(config, tokenizer, missing, summary)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise InputError(f"output: expected a directory to write in, found: {error}") from error
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise InputError(
            f"output: no space left for {output}: {summary.kept + summary.written} of {len(prompts)} completions are "
            "kept; free some space and run the same command again"
        ) from error
    return summary


def make_batches(prompts: Sequence[Prompt], encoded: Sequence[list[int]], batch_size: int) -> list[Batch]:
    """Put prompts of similar length together, to pad little; the longest come first, to run out of memory at once."""
    order = sorted(range(len(prompts)), key=lambda i: (-len(encoded[i]), i))
    rows = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [Batch(index, [prompts[i] for i in row], [encoded[i] for i in row]) for index, row in enumerate(rows)]


def complete(
    model: PreTrainedModel, generation: GenerationConfig, batch: Batch, seed: int
) -> list[tuple[list[int], str]]:
    """Complete a batch; the tokens are a function of the arguments only, whatever was sampled before.

    Args:
        model: the target, in eval mode.
        generation: says how to sample; its `eos_token_id` is a list, or None.
        batch: B prompts.
        seed: the run's seed; the batch's index is mixed in.

    Returns:
        For each prompt its completion's ids, up to and with the first end-of-sequence token, without padding; and the
        reason that it ended, "stop" or "length".
    """
    width = max(map(len, batch.prompt_ids))
    padding = [width - len(ids) for ids in batch.prompt_ids]
    pad = generation.pad_token_id
    input_ids = torch.tensor([[pad] * n + ids for n, ids in zip(padding, batch.prompt_ids, strict=True)])  # (B, width)
    attention_mask = (torch.arange(width) >= torch.tensor(padding)[:, None]).long()
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        mixed = hashlib.sha256(f"{seed}/{batch.index}".encode()).digest()
        torch.manual_seed(int.from_bytes(mixed[:8], "big") >> 1)
        sequences = model.generate(  # type: ignore[operator]
            input_ids.to(model.device),
            attention_mask=attention_mask.to(model.device),
            generation_config=generation,
        )
    ends = set(generation.eos_token_id or [])
    completions = []
    for row in sequences[:, width:].tolist():
        stop = next((i for i, token in enumerate(row) if token in ends), None)
        completions.append((row, "length") if stop is None else (row[: stop + 1], "stop"))
    return completions


def set_generation_config(
    config: PrepareConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> GenerationConfig:
    """Replace a model's generation config by one that samples as our settings say, and return it.

    `generate` fills whatever a config leaves open from the model's generation_config (a temperature, a repetition
    penalty, …) and then from the library's defaults (top_k=50). So the model's is replaced, its end-of-sequence ids
    kept, and every warper that we have is written out.
    """
    ends = model.generation_config.eos_token_id  # type: ignore[union-attr]
    if ends is None:
        ends = tokenizer.eos_token_id
    warpers = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    # Rows that pad the vocabulary to a round number are no tokens, but an untruncated distribution reaches them.
    no_tokens = list(range(len(tokenizer), model.config.get_text_config().vocab_size))
    model.generation_config = GenerationConfig(
        max_new_tokens=config.max_new_tokens,
        eos_token_id=[ends] if isinstance(ends, int) else ends,
        pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=no_tokens or None,
        do_sample=config.temperature > 0,
        **(warpers if config.temperature > 0 else {}),
    )
    return model.generation_config


def load_completions(path: str) -> Dataset:
    """Read the completions that `prepare` wrote; of an unfinished directory those that are there, with a warning.

    Returns:
        A data set with the columns `id`, `category`, `prompt_length`, `input_ids`, `loss_mask` and `finish_reason`.

    Raises:
        InputError: no such directory, no manifest or one of another schema, no shards, an unreadable shard.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise InputError(f"{path}: expected a directory of completions, found none")
    manifest = read_manifest(directory)
    files = sorted(directory.glob("shard-*.parquet"))
    if manifest is None or not files:
        missing = "no manifest.json" if manifest is None else "no shards"
        raise InputError(f"{path}: expected completions written by draftsmith prepare, found {missing}")
    shards = [read_shard(file) for file in files]
    for file, shard in zip(files, shards, strict=True):
        if shard is None:
            raise InputError(
                f"{file}: expected a shard of completions, found a damaged file; run draftsmith prepare again"
            )
    if len(files) < manifest["shards"]:
        logger.warning("%s: unfinished, %d of %d shards are there", path, len(files), manifest["shards"])
    return Dataset(pa.concat_tables(shards))


def split_empty(dataset: Dataset) -> tuple[Dataset, list[str]]:
    """Take out the samples whose loss mask is 0 everywhere: they train nothing, and must be told to the user.

    Returns:
        The samples that train, and the ids of those that do not.

    Raises:
        InputError: none of the samples trains; names the first ids.
    """
    trains = [any(mask) for mask in dataset["loss_mask"]]
    ids = [name for name, kept in zip(dataset["id"], trains, strict=True) if not kept]
    if len(ids) == len(trains):
        raise InputError(
            f"completions: expected tokens to train on, found an empty loss mask in all {len(ids)} samples, the first: "
            f"{', '.join(ids[:5]) or 'none'}"
        )
    return dataset.select([i for i, kept in enumerate(trains) if kept]), ids


def _complete(
    config: PrepareConfig, tokenizer: PreTrainedTokenizerBase, missing: list[Batch], summary: CompletionsSummary
) -> None:
    model = load_model(config.target, field="target", dtype=config.dtype, trust_remote_code=config.trust_remote_code)
    generation = set_generation_config(config, model, tokenizer)
    start = time.perf_counter()
    with tqdm(total=summary.prompts, initial=summary.kept, unit="completion", desc="prepare") as bar:
        for batch in missing:
            completions = complete(model, generation, batch, config.seed)
            shard = _shard(batch, completions)
            write_shard(summary.output / batch.shard, shard)
            summary.add(shard)
            summary.written += len(batch.prompts)
            summary.tokens_written += sum(len(ids) for ids, _ in completions)
            summary.seconds = time.perf_counter() - start
            bar.update(len(batch.prompts))


def _shard(batch: Batch, completions: list[tuple[list[int], str]]) -> pa.Table:
    rows = [
        {
            "id": prompt.id,
            "category": prompt.category,
            "prompt_length": len(prompt_ids),
            "input_ids": prompt_ids + ids,
            "loss_mask": [0] * len(prompt_ids) + [1] * len(ids),
            "finish_reason": finish_reason,
        }
        for prompt, prompt_ids, (ids, finish_reason) in zip(batch.prompts, batch.prompt_ids, completions, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=COLUMNS)


def _check_context(config: PrepareConfig, longest: Batch) -> None:
    # Not every architecture has such a limit; past it, a target that has one writes noise or fails.
    limit = getattr(_model_config(config).get_text_config(), "max_position_embeddings", None)
    length = len(longest.prompt_ids[0])
    if limit is not None and length + config.max_new_tokens > limit:
        raise InputError(
            f"max_prompt_tokens: expected prompt and completion within the target's {limit} positions, found "
            f"{length} + {config.max_new_tokens} tokens for prompt {longest.prompts[0].id!r}; "
            f"give --max_prompt_tokens {max(limit - config.max_new_tokens, 1)}, or a smaller --max_new_tokens"
        )


def _model_config(config: PrepareConfig) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(config.target, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise InputError(f"target: expected a model's config.json in {config.target}, found: {error}") from error


def _manifest(config: PrepareConfig, prompts: list[Prompt], encoded: list[list[int]], shards: int) -> dict[str, Any]:
    """Say what determines every token of the completions; where the inputs lay and the versions are for the reader."""
    digest = hashlib.sha256()
    for prompt, ids in zip(prompts, encoded, strict=True):
        digest.update(json.dumps([prompt.id, prompt.category, ids]).encode())
    return {
        "schema": SCHEMA,
        "settings": {name: getattr(config, name) for name in SETTINGS},
        "prompts": {"path": config.prompts, "sha256": digest.hexdigest(), "count": len(prompts)},
        "target": {"path": config.target} | _identity(config),
        "shards": shards,
        "versions": {name: version(name) for name in ("draftsmith", "torch", "transformers")},
    }


def _identity(config: PrepareConfig) -> dict[str, Any]:
    """Tell a target from another without reading all of its weights: a model trained on keeps its names and sizes."""
    directory = Path(config.target)
    if not directory.is_dir():
        return {"commit": _model_config(config)._commit_hash}
    identity: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        if (directory / name).is_file():
            identity[name] = hashlib.sha256((directory / name).read_bytes()).hexdigest()
    for path in sorted([*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin")]):
        size, digest = path.stat().st_size, hashlib.sha256()
        with path.open("rb") as file:
            for sample in range(64):
                file.seek(size * sample // 64)
                digest.update(file.read(1 << 16))
        identity[path.name] = {"bytes": size, "sampled_sha256": digest.hexdigest()}
    return identity
