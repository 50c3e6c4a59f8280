"""Completions that the target writes itself: the text that a draft is distilled on, because it is what it will draft.

The target writes them here or on a server, or they were written before and are given. An output directory holds
`manifest.json` (`"draftsmith.completions/1"`: the settings and inputs that determine every token) and one Parquet shard
a batch. A shard is written aside and renamed, and a batch is seeded by its index, so a run that was killed goes on
where it stopped and ends with the bytes that an uninterrupted run writes (those of a server as far as it repeats
itself).
"""

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset
from torch import Tensor
from tqdm.auto import tqdm
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from draftsmith.decode.errors import InputError
from draftsmith.train.checkpoint import end_ids, load_generation_config
from draftsmith.train.data.chat_masks import mask_conversation
from draftsmith.train.data.endpoint import Vocabulary, complete_remotely, served_model
from draftsmith.train.data.prepare_config import PrepareConfig as PrepareConfig
from draftsmith.train.data.prepare_config import decisive_settings
from draftsmith.train.data.prompts import encode_prompt, read_prompts
from draftsmith.train.data.samples import Batch, Completion, Sample, make_batches, mixed_seed
from draftsmith.train.data.samples import CompletionsSummary as CompletionsSummary
from draftsmith.train.data.shards import (
    SCHEMA,
    completion_files,
    output_directory,
    read_completions,
    read_manifest,
    read_shard,
    settle_manifest,
    write_shard,
)
from draftsmith.train.models import identity, load_config, load_model, load_tokenizer, resolve_dtype, tokenizer_size

logger = logging.getLogger(__name__)


def prepare(config: PrepareConfig) -> CompletionsSummary:
    """Complete every prompt with the target, one shard a batch, and skip the shards that an earlier run left.

    Returns:
        What was written and kept.

    Raises:
        InputError: prompts, target or server that cannot be used, an output directory of other settings or inputs (the
            message names the first), or a full disk (what was written so far is kept).
    """
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    if config.endpoint is None and config.answers == "target":  # before the manifest is compared, which says it
        dtype = resolve_dtype(config.dtype, config.target, trust_remote_code=config.trust_remote_code)
        config = replace(config, dtype=dtype)
    output = Path(config.output)
    model_config = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
    # Not every architecture has such a limit; past it, a target that has one writes noise or fails.
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    summary = CompletionsSummary(output, 0)
    source: dict[str, Any] = {"answers": config.answers}
    if config.answers == "given":
        samples = _given(config, tokenizer, limit, summary)
    else:
        samples = _prompts(config, tokenizer, limit)
    summary.prompts = len(samples)
    batches = make_batches(samples, config.batch_size)
    if config.endpoint is not None:
        source |= {"endpoint": config.endpoint, "model": served_model(config)}
    with output_directory(output, lambda: f"{summary.kept + summary.written} of {summary.prompts} completions"):
        settle_manifest(output, _manifest(config, source, samples, len(batches)))
        missing = []
        for batch in batches:
            shard = read_shard(output / batch.shard)
            if shard is not None and shard["id"].to_pylist() == batch.names:
                summary.add(shard)
                summary.kept += len(batch.samples)
            else:
                missing.append(batch)
        if missing:
            _complete(config, tokenizer, model_config, source.get("model"), missing, summary)
    return summary


def complete(
    model: PreTrainedModel,
    generation: GenerationConfig,
    prompt_ids: Sequence[list[int]],
    seed: int,
    *,
    device: torch.device | None = None,
    synced: bool = False,
    bar: Any = None,
) -> list[Completion]:
    """Complete prompts together; the tokens are a function of the arguments only, whatever was sampled before.

    Args:
        model: a causal LM, in eval mode.
        generation: says how to sample; its `eos_token_id` is a list, or None.
        prompt_ids: B prompts, each at least one token long.
        seed: of the sampling.
        device: where the model computes; where its weights are if None.
        synced: go on with empty forwards until every process is done, for a model that is sharded over them.
        bar: a tqdm bar that shows how far the batch is, which can take minutes.

    Returns:
        B completions, without padding.
    """
    device, width = device or model.device, max(map(len, prompt_ids))
    padding = [width - len(ids) for ids in prompt_ids]
    pad = generation.pad_token_id
    input_ids = torch.tensor([[pad] * n + ids for n, ids in zip(padding, prompt_ids, strict=True)])  # (B, width)
    attention_mask = (torch.arange(width) >= torch.tensor(padding)[:, None]).long()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        sequences: Any = model.generate(  # type: ignore[operator]
            input_ids.to(device),
            attention_mask=attention_mask.to(device),
            generation_config=generation,
            stopping_criteria=StoppingCriteriaList([] if bar is None else [_Watch(bar, width, generation)]),
            synced_gpus=synced,
        )
    ends = set(generation.eos_token_id or [])
    completions = []
    for row in sequences[:, width:].tolist():
        stop = next((i for i, token in enumerate(row) if token in ends), None)
        completions.append(Completion(row, "length") if stop is None else Completion(row[: stop + 1], "stop"))
    return completions


class _Watch(StoppingCriteria):  # type: ignore[misc]
    """Shows in a bar how long the completions of a batch are, and stops none."""

    def __init__(self, bar: Any, width: int, generation: GenerationConfig):
        self.bar, self.width, self.most = bar, width, generation.max_new_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        rows, length = input_ids.shape
        self.bar.set_postfix_str(f"{rows} texts, token {length - self.width} of {self.most}", refresh=False)
        self.bar.update(0)  # which draws it anew where the last time is long enough ago
        return torch.zeros(rows, dtype=torch.bool, device=input_ids.device)


def set_generation_config(
    config: PrepareConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> GenerationConfig:
    """Replace a model's generation config by one that samples as our settings say, and return it.

    `generate` fills whatever a config leaves open from the model's generation_config (a temperature, a repetition
    penalty, …) and then from the library's defaults (top_k=50). So the model's is replaced, its end-of-sequence ids
    kept, and every setting that we have is written out.
    """
    ends = end_of_sequence_ids(model.generation_config, tokenizer)
    # Rows that pad the vocabulary to a round number are no tokens, but an untruncated distribution reaches them.
    no_tokens = list(range(tokenizer_size(tokenizer), model.config.get_text_config().vocab_size))
    model.generation_config = GenerationConfig(
        max_new_tokens=config.max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=no_tokens or None,
        **config.generate_kwargs(),
    )
    return model.generation_config


def end_of_sequence_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end a text: those of the model's generation config, else the tokenizer's; maybe none."""
    ends = end_ids(generation)
    return ends or ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])


def load_completions(path: str, vocab_size: int | None = None) -> Dataset:
    """Read the completions that `prepare` wrote; of an unfinished directory those that are there, with a warning.

    Args:
        path: the directory.
        vocab_size: what the ids of tokens must be below; not looked at if None.

    Returns:
        A data set with the columns `id`, `category`, `prompt_length`, `input_ids`, `loss_mask` and `finish_reason`.

    Raises:
        InputError: no such directory, no manifest or one of another schema, no shards, an unreadable shard, samples
            that `prepare` does not write, none of them, or one twice.
    """
    samples = pa.concat_tables([read_completions(file, vocab_size) for file in completion_files(path)])
    if not len(samples):
        raise InputError(f"{path}: expected completions, found shards without samples")
    names = samples["id"].value_counts()
    twice = names.filter(pc.greater(names.field("counts"), 1)).field("values")
    if len(twice):
        raise InputError(f"{path}: expected each sample once, found {twice[0].as_py()!r} again")
    return Dataset(samples)


def other_target(path: str, target: str, trust_remote_code: bool = False) -> str | None:
    """Return the target that wrote completions, if it is another, by its config and weights, than the one given.

    Args:
        path: the completions.
        target: a directory or hub id.
        trust_remote_code: run configuration code that the repository ships.
    """
    written = (read_manifest(Path(path)) or {}).get("target", {})
    known = identity(target, trust_remote_code=trust_remote_code)
    differs = any(written[name] != known[name] for name in written.keys() & known.keys() - {"generation_config.json"})
    return str(written.get("path")) if differs else None


def _prompts(config: PrepareConfig, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> list[Sample]:
    """Encode the prompts, which must leave room for their completions within the target's positions."""
    read = read_prompts(config.prompts, split=config.split, limit=config.limit)
    prompts = read + [replace(p, id=f"{p.id}#{n}") for n in range(2, config.samples + 1) for p in read]
    samples = [Sample(p, encode_prompt(p, tokenizer, max_tokens=config.max_prompt_tokens)) for p in prompts]
    longest = max(samples, key=lambda sample: len(sample.ids))
    if limit is not None and len(longest.ids) + config.max_new_tokens > limit:
        raise InputError(
            f"max_prompt_tokens: expected prompt and completion within the target's {limit} positions, found "
            f"{len(longest.ids)} + {config.max_new_tokens} tokens for prompt {longest.prompt.id!r}; "
            f"give --max_prompt_tokens {max(limit - config.max_new_tokens, 1)}, or a smaller --max_new_tokens"
        )
    return samples


def _given(
    config: PrepareConfig, tokenizer: PreTrainedTokenizerBase, limit: int | None, summary: CompletionsSummary
) -> list[Sample]:
    """Encode the conversations that fit the target's positions, and mask what the assistant wrote."""
    samples, reasons = list[Sample](), set[str]()
    for conversation in read_prompts(config.prompts, split=config.split, limit=config.limit, answers="required"):
        masked = mask_conversation(conversation.messages or [], tokenizer, conversation.id)
        reasons.update(masked.left_out.values())
        if limit is not None and len(masked.ids) > limit:  # cut, it would teach an answer that ends in the middle
            summary.left_out.append(conversation.id)
        else:
            samples.append(Sample(conversation, masked.ids, masked.mask))
    for reason in sorted(reasons):
        logger.warning(
            "some assistant turns are not learned from: %s (`draftsmith doctor --prompts` counts them)", reason
        )
    if not samples:
        raise InputError(
            f"prompts: expected conversations within the target's {limit} positions, found all "
            f"{len(summary.left_out)} of {config.prompts} longer"
        )
    return samples


def _complete(
    config: PrepareConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PretrainedConfig,
    served: str | None,
    missing: list[Batch],
    summary: CompletionsSummary,
) -> None:
    """Write the shards that are missing: of given conversations, or completed by a server or by the target here."""
    start = time.perf_counter()
    drawn = {"mininterval": 0.5, "miniters": 0}  # by time alone: a batch shows each of its tokens
    with tqdm(total=summary.prompts, initial=summary.kept, unit="completion", desc="prepare", **drawn) as bar:

        def write(batch: Batch, shard: pa.Table) -> None:
            before = summary.tokens
            write_shard(summary.output / batch.shard, shard)
            summary.add(shard)
            summary.written += len(batch.samples)
            summary.tokens_written += summary.tokens - before
            summary.seconds = time.perf_counter() - start
            bar.update(len(batch.samples))

        def finished(batch: Batch, completions: list[Completion]) -> None:
            summary.uncertain += sum(completion.uncertain for completion in completions)
            summary.padded += sum(completion.padded for completion in completions)
            write(batch, batch.completed(completions))

        if config.answers == "given":
            for batch in missing:
                write(batch, batch.given())
        elif served is not None:
            tokens = tokenizer_size(tokenizer)
            size = max(tokens, model_config.get_text_config().vocab_size)
            stored = load_generation_config(config.target, model_config, field="target")
            ends = end_of_sequence_ids(stored, tokenizer)
            complete_remotely(config, served, Vocabulary(tokenizer, tokens, size, ends), missing, finished)
        else:
            model = load_model(
                config.target, field="target", dtype=config.dtype, trust_remote_code=config.trust_remote_code
            )
            generation = set_generation_config(config, model, tokenizer)
            for batch in missing:
                seed = mixed_seed(config.seed, batch.index)
                finished(batch, complete(model, generation, [s.ids for s in batch.samples], seed, bar=bar))


def _manifest(config: PrepareConfig, source: dict[str, Any], samples: list[Sample], shards: int) -> dict[str, Any]:
    """Say what determines every token of the completions; where the inputs lay and the versions are for the reader."""
    digest = hashlib.sha256()
    for sample in samples:
        mask = [] if sample.mask is None else [sample.mask]
        digest.update(json.dumps([sample.prompt.id, sample.prompt.category, sample.ids, *mask]).encode())
    decides = config.endpoint is None and config.answers == "target"  # else the weights need not be there
    return {
        "schema": SCHEMA,
        "source": source,
        "settings": {name: getattr(config, name) for name in decisive_settings(config)},
        "prompts": {"path": config.prompts, "sha256": digest.hexdigest(), "count": len(samples)},
        "target": {"path": config.target} | identity(config.target, decides, config.trust_remote_code),
        "shards": shards,
        "versions": {name: version(name) for name in ("draftsmith", "torch", "transformers")},
    }
