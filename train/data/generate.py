"""Completions that the target writes itself: the text that a draft is distilled on, because it is what it will draft.

The target writes them here or on a server, or they were written before and are given. An output directory holds
`manifest.json` (`"draftsmith.completions/1"`: the settings and inputs that determine every token) and one Parquet shard
a batch. A shard is written aside and renamed, and a batch is seeded by its own index, so a run that was killed goes on
where it stopped and ends with the bytes that an uninterrupted run writes (those of a server as far as it repeats
itself).
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset
from torch import Tensor
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from draftsmith.decode.errors import InputError
from draftsmith.train.data.chat_masks import encode_conversation
from draftsmith.train.data.endpoint import Completion, Vocabulary, complete_remotely, served_model
from draftsmith.train.data.prepare_config import PrepareConfig as PrepareConfig
from draftsmith.train.data.prepare_config import decisive_settings
from draftsmith.train.data.prompts import Prompt, encode_prompt, read_conversations, read_prompts
from draftsmith.train.data.samples import Batch as Batch
from draftsmith.train.data.samples import CompletionsSummary as CompletionsSummary
from draftsmith.train.data.samples import completed_shard, given_shard
from draftsmith.train.data.samples import make_batches as make_batches
from draftsmith.train.data.shards import (
    SCHEMA,
    completion_files,
    output_directory,
    read_completions,
    read_shard,
    settle_manifest,
    write_shard,
)
from draftsmith.train.models import identity, load_model, load_tokenizer, resolve_dtype, tokenizer_size

logger = logging.getLogger(__name__)

Write = Callable[[Batch, pa.Table], None]


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
    summary = CompletionsSummary(output, 0)
    masks: dict[str, list[int]] | None = None
    if config.answers == "given":
        prompts, encoded, masks = _given(config, tokenizer, summary)
    else:
        read = read_prompts(config.prompts, split=config.split, limit=config.limit)
        prompts = read + [replace(p, id=f"{p.id}#{n}") for n in range(2, config.samples + 1) for p in read]
        encoded = [encode_prompt(prompt, tokenizer, max_tokens=config.max_prompt_tokens) for prompt in prompts]
    summary.prompts = len(prompts)
    batches = make_batches(prompts, encoded, config.batch_size)
    source: dict[str, Any] = {"answers": config.answers}
    if masks is None:
        _check_context(config, batches[0])
    if config.endpoint is not None:
        source |= {"endpoint": config.endpoint, "model": served_model(config)}
    with output_directory(output, lambda: f"{summary.kept + summary.written} of {len(prompts)} completions"):
        settle_manifest(output, _manifest(config, source, prompts, encoded, masks, len(batches)))
        missing = []
        for batch in batches:
            shard = read_shard(output / batch.shard)
            if shard is not None and shard["id"].to_pylist() == [prompt.id for prompt in batch.prompts]:
                summary.add(shard)
                summary.kept += len(batch.prompts)
            else:
                missing.append(batch)
        if missing:
            _complete(config, tokenizer, source.get("model"), masks, missing, summary)
    return summary


def complete(
    model: PreTrainedModel,
    generation: GenerationConfig,
    batch: Batch,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> list[tuple[list[int], str]]:
    """Complete a batch; the tokens are a function of the arguments only, whatever was sampled before.

    Args:
        model: the target, in eval mode.
        generation: says how to sample; its `eos_token_id` is a list, or None.
        batch: B prompts.
        seed: the run's seed; the batch's index is mixed in.
        progress: called after each token with the number of tokens that the longest completion has so far.

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
            stopping_criteria=StoppingCriteriaList([] if progress is None else [_Watch(width, progress)]),
        )
    ends = set(generation.eos_token_id or [])
    completions = []
    for row in sequences[:, width:].tolist():
        stop = next((i for i, token in enumerate(row) if token in ends), None)
        completions.append((row, "length") if stop is None else (row[: stop + 1], "stop"))
    return completions


class _Watch(StoppingCriteria):  # type: ignore[misc]
    """Tells how long completions are, and stops none."""

    def __init__(self, prompt_length: int, progress: Callable[[int], None]):
        self.prompt_length, self.progress = prompt_length, progress

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        self.progress(input_ids.shape[1] - self.prompt_length)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


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
    ends = None if generation is None else generation.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or [])


def load_completions(path: str) -> Dataset:
    """Read the completions that `prepare` wrote; of an unfinished directory those that are there, with a warning.

    Returns:
        A data set with the columns `id`, `category`, `prompt_length`, `input_ids`, `loss_mask` and `finish_reason`.

    Raises:
        InputError: no such directory, no manifest or one of another schema, no shards, an unreadable shard.
    """
    return Dataset(pa.concat_tables([read_completions(file) for file in completion_files(path)]))


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


def _given(
    config: PrepareConfig, tokenizer: PreTrainedTokenizerBase, summary: CompletionsSummary
) -> tuple[list[Prompt], list[list[int]], dict[str, list[int]]]:
    """Encode the conversations that fit the target's positions: themselves, their ids, and a loss mask an id."""
    limit = _positions(config)
    conversations, encoded, masks = [], [], {}
    for conversation in read_conversations(config.prompts, split=config.split, limit=config.limit):
        ids, mask = encode_conversation(conversation.messages or [], tokenizer, conversation.id)
        if limit is not None and len(ids) > limit:  # cut, it would teach an answer that ends in the middle
            summary.left_out.append(conversation.id)
        else:
            conversations.append(conversation)
            encoded.append(ids)
            masks[conversation.id] = mask
    if not conversations:
        raise InputError(
            f"prompts: expected conversations within the target's {limit} positions, found all "
            f"{len(summary.left_out)} of {config.prompts} longer"
        )
    return conversations, encoded, masks


def _complete(
    config: PrepareConfig,
    tokenizer: PreTrainedTokenizerBase,
    served: str | None,
    masks: dict[str, list[int]] | None,
    missing: list[Batch],
    summary: CompletionsSummary,
) -> None:
    """Write the shards that are missing, from given masks, by a server or by the target here, and count them."""
    start = time.perf_counter()
    with tqdm(total=summary.prompts, initial=summary.kept, unit="completion", desc="prepare") as bar:

        def write(batch: Batch, shard: pa.Table) -> None:
            before = summary.tokens
            write_shard(summary.output / batch.shard, shard)
            summary.add(shard)
            summary.written += len(batch.prompts)
            summary.tokens_written += summary.tokens - before
            summary.seconds = time.perf_counter() - start
            bar.update(len(batch.prompts))

        if masks is not None:
            for batch in missing:
                write(batch, given_shard(batch, masks))
        elif served is not None:
            _complete_remotely(config, tokenizer, served, missing, summary, write)
        else:
            model = load_model(
                config.target, field="target", dtype=config.dtype, trust_remote_code=config.trust_remote_code
            )
            generation = set_generation_config(config, model, tokenizer)
            for batch in missing:
                tell = _teller(bar, f"{len(batch.prompts)} texts, token {{}} of {config.max_new_tokens}")
                write(batch, completed_shard(batch, complete(model, generation, batch, config.seed, tell)))


def _teller(bar: Any, text: str, every: float = 0.5) -> Callable[[int], None]:
    """Return what writes a number into a bar's text behind it, at most so often: a batch can take minutes."""
    last = time.perf_counter()

    def tell(number: int) -> None:
        nonlocal last
        if time.perf_counter() - last >= every:
            bar.set_postfix_str(text.format(number))
            last = time.perf_counter()

    return tell


def _complete_remotely(
    config: PrepareConfig,
    tokenizer: PreTrainedTokenizerBase,
    served: str,
    missing: list[Batch],
    summary: CompletionsSummary,
    write: Write,
) -> None:
    def finished(batch: Batch, completions: list[Completion]) -> None:
        summary.uncertain += sum(completion.uncertain for completion in completions)
        summary.padded += sum(completion.padded for completion in completions)
        write(batch, completed_shard(batch, [(c.ids, c.finish_reason) for c in completions]))

    tokens = tokenizer_size(tokenizer)
    size = max(tokens, _model_config(config).get_text_config().vocab_size)
    ends = end_of_sequence_ids(_generation_config(config), tokenizer)
    vocabulary = Vocabulary(tokenizer, tokens, size, ends)
    complete_remotely(config, served, vocabulary, missing, finished)


def _check_context(config: PrepareConfig, longest: Batch) -> None:
    limit = _positions(config)
    length = len(longest.prompt_ids[0])
    if limit is not None and length + config.max_new_tokens > limit:
        raise InputError(
            f"max_prompt_tokens: expected prompt and completion within the target's {limit} positions, found "
            f"{length} + {config.max_new_tokens} tokens for prompt {longest.prompts[0].id!r}; "
            f"give --max_prompt_tokens {max(limit - config.max_new_tokens, 1)}, or a smaller --max_new_tokens"
        )


def _positions(config: PrepareConfig) -> int | None:
    # Not every architecture has such a limit; past it, a target that has one writes noise or fails.
    return getattr(_model_config(config).get_text_config(), "max_position_embeddings", None)


def _model_config(config: PrepareConfig) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(config.target, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise InputError(f"target: expected a model's config.json in {config.target}, found: {error}") from error


def _generation_config(config: PrepareConfig) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(config.target)
    except OSError:  # older models keep it in config.json
        return GenerationConfig.from_model_config(_model_config(config))


def _manifest(
    config: PrepareConfig,
    source: dict[str, Any],
    prompts: list[Prompt],
    encoded: list[list[int]],
    masks: dict[str, list[int]] | None,
    shards: int,
) -> dict[str, Any]:
    """Say what determines every token of the completions; where the inputs lay and the versions are for the reader."""
    digest = hashlib.sha256()
    for prompt, ids in zip(prompts, encoded, strict=True):
        mask = [] if masks is None else [masks[prompt.id]]
        digest.update(json.dumps([prompt.id, prompt.category, ids, *mask]).encode())
    decides = config.endpoint is None and config.answers == "target"  # else the weights need not be there
    return {
        "schema": SCHEMA,
        "source": source,
        "settings": {name: getattr(config, name) for name in decisive_settings(config)},
        "prompts": {"path": config.prompts, "sha256": digest.hexdigest(), "count": len(prompts)},
        "target": {"path": config.target} | identity(config.target, decides, config.trust_remote_code),
        "shards": shards,
        "versions": {name: version(name) for name in ("draftsmith", "torch", "transformers")},
    }
