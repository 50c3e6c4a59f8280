"""Completions that the target writes itself: the text that a draft is distilled on, because it is what it will draft.

The target writes them here or on a server, or they were written before and are given. An output directory holds
`manifest.json` (`"draftsmith.completions/1"`: the settings and inputs that determine every token) and Parquet shards.
The prompts of a shard are completed in one process, as one queue that its index seeds, and it is written aside and
renamed. So a run that was killed resumes where it stopped, by any number of processes, and ends with the bytes that an
uninterrupted run of one process writes (those of a server as far as it repeats itself). One that is interrupted or
terminated keeps the texts of the shard that it was at, too (`begun.py`).
"""

import hashlib
import json
import logging
import time
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import each, phase
from draftsmith.train.checkpoint import end_of_sequence_ids, left_out, load_generation_config
from draftsmith.train.data.begun import BegunShard, WritingProgress
from draftsmith.train.data.chat.masks import ClosingTokens
from draftsmith.train.data.corpus import write_prompts
from draftsmith.train.data.decoding import complete, set_generation_config
from draftsmith.train.data.prepare_config import SHARD_BATCHES, decisive_settings
from draftsmith.train.data.prepare_config import PrepareConfig as PrepareConfig
from draftsmith.train.data.prompts import encode_prompt, mask_answers, read_prompts
from draftsmith.train.data.samples import Completion, Sample, ShardBatch, make_batches, mixed_seed
from draftsmith.train.data.samples import CompletionsSummary as CompletionsSummary
from draftsmith.train.data.shards import (
    MANIFEST,
    SCHEMA,
    completion_files,
    output_directory,
    read_completions,
    read_manifest,
    read_shard,
    settle_manifest,
    write_shard,
)
from draftsmith.train.data.turns import PROMPTS, answer_texts, next_turn, turn_directory, turn_record
from draftsmith.train.endpoint.completions import Vocabulary, complete_remotely, served_model
from draftsmith.train.files import require_writable
from draftsmith.train.job.processes import Processes, launched, terminable
from draftsmith.train.models import (
    check_head,
    identity,
    load_config,
    load_model,
    load_tokenizer,
    named_device,
    resolve_dtype,
)

logger = logging.getLogger(__name__)


def prepare(config: PrepareConfig) -> CompletionsSummary:
    """Complete every prompt with the target, a shard at a time, and skip the shards that an earlier run left.

    Of several processes that were launched together, each writes its share of the shards, and the same bytes in them.

    Returns:
        What was written and kept, by all processes.

    Raises:
        InputError: prompts, target or server that cannot be used, an output directory of other settings or inputs (the
            message names the first), or a full disk (what was written so far is kept).
    """
    with launched() as processes, terminable():
        config.require_own_device(processes.count)
        if processes.first and config.answers == "target":
            target_config = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
            left_out(load_generation_config(config.target, target_config, field="target"), config.target)
        summary = (_prepare if config.turns == "first" else _prepare_turns)(config, processes)
    done = summary.kept + summary.written
    if processes.first and summary.cut > done / 2:  # a draft would learn how texts go on, and not how they end
        logger.warning(
            "%d of %d completions were cut at max_new_tokens: raise it, or check that the target can end its texts "
            "(chat template, end-of-sequence ids)",
            summary.cut,
            done,
        )
    return summary


def _prepare_turns(config: PrepareConfig, processes: Processes) -> CompletionsSummary:
    """Complete the first turn of all prompts, then the next one of those that have one, to the last."""
    asked = read_prompts(config.prompts, split=config.split, limit=config.limit, later=True)
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    model_config = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    output, number, summaries, records = Path(config.output), 0, list[CompletionsSummary](), list[dict[str, Any]]()
    too_long = list[str]()

    def writable() -> None:
        require_writable(output)

    processes.after_the_first(writable)
    while asked:
        number += 1
        turns = [turn_record(prompt, number) for prompt in asked]
        records += turns
        path, directory = output / f"turn-{number}.jsonl", turn_directory(output, number)
        processes.after_the_first(partial(write_prompts, path, turns))
        processes.require_shared(path)
        one = replace(config, prompts=str(path), output=str(directory), split="train", limit=None)
        summaries.append(_prepare(one, processes))
        answers = answer_texts(list(load_completions(str(directory))), number, tokenizer)
        templated = tokenizer.chat_template is not None
        asked = [next_turn(prompt, answers[prompt.id], templated) for prompt in asked if prompt.later]
        if limit is not None and config.max_prompt_tokens is None:
            room = limit - config.new_tokens(limit)
            fits = [len(encode_prompt(prompt, tokenizer, **config.encoding)) <= room for prompt in asked]
            too_long += [f"{each.id}.{number + 1}" for each, its in zip(asked, fits, strict=True) if not its]
            asked = [each for each, its in zip(asked, fits, strict=True) if its]
    processes.after_the_first(partial(write_prompts, output / PROMPTS, records))
    summary = CompletionsSummary.of_turns(output, summaries)
    summary.left_out += too_long
    return summary


def _prepare(config: PrepareConfig, processes: Processes) -> CompletionsSummary:
    """Write this process's share; return what all have written, once they have."""
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    if config.endpoint is None and config.answers == "target":  # before the manifest is compared, which says it
        dtype = resolve_dtype(
            config.dtype,
            config.target,
            device=named_device(config.target_device),
            trust_remote_code=config.trust_remote_code,
        )
        config = replace(config, dtype=dtype)
    output = Path(config.output)
    model_config = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
    check_head(model_config, tokenizer, "target")
    # Not every architecture has such a limit; past it, a target that has one writes noise or fails.
    text_config = model_config.get_text_config()
    limit, size = getattr(text_config, "max_position_embeddings", None), text_config.vocab_size
    shard_size = config.shard_size or SHARD_BATCHES * config.batch_size
    new_tokens = config.new_tokens(limit)
    config = replace(config, shard_size=shard_size, max_new_tokens=new_tokens)
    summary = CompletionsSummary(output, 0)
    source: dict[str, Any] = {"answers": config.answers}
    stored = load_generation_config(config.target, model_config, field="target")
    own = left_out(stored) if config.answers == "target" else []
    if config.answers == "given":
        samples = _given(config, tokenizer, size, limit, end_of_sequence_ids(stored, tokenizer), summary)
    else:
        samples = _prompts(config, tokenizer, size, limit, new_tokens)
    summary.prompts = len(samples)
    batches = make_batches(samples, shard_size)
    if config.endpoint is not None:
        source |= {"endpoint": config.endpoint, "model": served_model(config)}
    with output_directory(output, lambda: str(summary), processes.first):
        manifest = _manifest(config, source, samples, len(batches), own)
        processes.after_the_first(lambda: settle_manifest(output, manifest))
        processes.require_shared(output / MANIFEST)
        missing = []
        for batch in each(processes.share(batches), "shards that are there", "shards"):
            shard = read_shard(output / batch.shard)
            if shard is not None and shard["id"].to_pylist() == batch.names:
                summary.add(shard)
                summary.kept += len(batch.samples)
                BegunShard(output, batch).end()
            else:
                missing.append(batch)
        if missing:
            ends = end_of_sequence_ids(stored, tokenizer)
            _complete(config, tokenizer, model_config, source.get("model"), ends, missing, summary, processes)
        return CompletionsSummary.over(processes.gathered(summary))


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
    current = identity(target, trust_remote_code=trust_remote_code)
    differs = any(
        written[name] != current[name] for name in written.keys() & current.keys() - {"generation_config.json"}
    )
    return str(written.get("path")) if differs else None


def _prompts(
    config: PrepareConfig, tokenizer: PreTrainedTokenizerBase, size: int, limit: int | None, new_tokens: int
) -> list[Sample]:
    """Encode the prompts, which must leave room for their completions within the target's positions."""
    read = read_prompts(config.prompts, split=config.split, limit=config.limit)
    prompts = each(read, "prompts", "texts")
    ids = [encode_prompt(p, tokenizer, vocab_size=size, **config.encoding) for p in prompts]
    samples = [
        Sample(p if n == 1 else replace(p, id=f"{p.id}#{n}"), own, temperature=temperature)
        for n, temperature in enumerate(config.plan(), 1)
        for p, own in zip(read, ids, strict=True)
    ]
    named = dict[str, str]()  # with several samples of a prompt, "a" may become another's "a#2"
    for sample, prompt in zip(samples, read * len(config.plan()), strict=True):
        if (first := named.setdefault(sample.prompt.id, prompt.id)) != prompt.id:
            raise InputError(
                f"prompts: expected ids that differ with their samples' numbers behind them, found "
                f"{sample.prompt.id!r} of {first!r} and of {prompt.id!r}"
            )
    longest = max(samples, key=lambda sample: len(sample.ids))
    if limit is not None and len(longest.ids) + new_tokens > limit:
        raise InputError(
            f"max_prompt_tokens: expected prompt and completion within the target's {limit} positions, found "
            f"{len(longest.ids)} + {new_tokens} tokens for prompt {longest.prompt.id!r}; "
            f"give --max_prompt_tokens {max(limit - new_tokens, 1)}, or a smaller --max_new_tokens"
        )
    return samples


def _given(
    config: PrepareConfig,
    tokenizer: PreTrainedTokenizerBase,
    size: int,
    limit: int | None,
    ends: list[int],
    summary: CompletionsSummary,
) -> list[Sample]:
    """Encode the conversations that fit the target's positions, and mask what the assistant wrote."""
    samples, reasons, closing = list[Sample](), set[str](), ClosingTokens.of(tokenizer)
    read = read_prompts(config.prompts, split=config.split, limit=config.limit, answers="required")
    for conversation in each(read, "masks of conversations", "texts"):
        if conversation.cut:
            summary.unfinished.append(conversation.id)
            continue
        masked = mask_answers(conversation, tokenizer, size, closing, ends, **config.template)
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
        cut = f" or cut ({len(summary.unfinished)})" if summary.unfinished else ""
        raise InputError(
            f"prompts: expected conversations within the target's {limit} positions, found all "
            f"{len(summary.left_out) + len(summary.unfinished)} of {config.prompts} longer{cut}"
        )
    return samples


def _complete(
    config: PrepareConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PretrainedConfig,
    served: str | None,
    ends: list[int],
    missing: list[ShardBatch],
    summary: CompletionsSummary,
    processes: Processes,
) -> None:
    """Write the shards that are missing: of given conversations, or completed by a server or by the target here."""
    start, texts, most = time.perf_counter(), sum(len(batch.samples) for batch in missing), config.new_tokens()

    def write(batch: ShardBatch, shard: pa.Table) -> None:
        before = summary.tokens
        write_shard(summary.output / batch.shard, shard)
        summary.add(shard)
        summary.written += len(batch.samples)
        summary.tokens_written += summary.tokens - before
        summary.seconds = time.perf_counter() - start

    def finished(batch: ShardBatch, completions: list[Completion]) -> None:
        summary.uncertain += sum(completion.uncertain for completion in completions)
        summary.padded += sum(completion.padded for completion in completions)
        write(batch, batch.completed(completions))

    tokens, size = token_count(tokenizer, model_config), model_config.get_text_config().vocab_size
    if config.answers == "given":
        for batch in each(missing, processes.title("prepare"), "shards"):
            write(batch, batch.given())
        return
    if served is not None:
        vocabulary = Vocabulary(tokenizer, tokens, size, ends)
        with phase(processes.title("prepare"), texts * most, "tokens") as writing:
            counted = WritingProgress(writing, texts, most)
            complete_remotely(config, served, vocabulary, missing, finished, lambda count: counted.add(count, count))
        return
    model = load_model(
        config.target,
        field="target",
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        device=config.target_device,
        quantization=config.target_quantization,
    )
    with phase(processes.title("prepare"), texts * most, "tokens") as writing:
        counted = WritingProgress(writing, texts, most)
        for batch in missing:
            temperature = batch.samples[0].temperature
            sampling = config if temperature is None else config.at(temperature)
            generation = set_generation_config(sampling, most, model, tokenizer, tokens)
            begun = BegunShard(summary.output, batch)
            try:
                finished(batch, _completed(config, model, generation, batch, begun, counted))
            except KeyboardInterrupt:
                begun.keep()
                summary.begun += begun.tokens
                raise
            begun.end()


def _completed(
    config: PrepareConfig,
    model: PreTrainedModel,
    generation: GenerationConfig,
    batch: ShardBatch,
    begun: BegunShard,
    counted: WritingProgress,
) -> list[Completion]:
    """Complete a shard's prompts here, from where an interrupted run has left them."""
    there = [list(text) for text in begun.texts]
    counted.take_up(begun.tokens)

    def observe(place: int, tokens: list[int], ended: bool) -> None:
        begun.texts[place] += tokens
        counted.add(len(tokens), len(begun.texts[place]) if ended else None)

    prompts, seed = [sample.ids for sample in batch.samples], mixed_seed(config.seed, batch.index)
    completions = complete(model, generation, prompts, seed, rows=config.batch_size, begun=there, observer=observe)
    for before, completion in zip(there, completions, strict=True):
        if len(before) == len(completion.ids):  # it had ended
            counted.add(0, len(before))
    return completions


def _manifest(
    config: PrepareConfig, source: dict[str, Any], samples: list[Sample], shards: int, own: list[str]
) -> dict[str, Any]:
    """Say what determines every token of the completions; where the inputs lay and the versions are for the reader."""
    digest = hashlib.sha256()
    for sample in samples:
        mask = [] if sample.mask is None else [sample.mask]
        heat = [] if sample.temperature is None else [f"temperature {sample.temperature}"]
        digest.update(json.dumps([sample.prompt.id, sample.prompt.category, sample.ids, *mask, *heat]).encode())
    decides = config.endpoint is None and config.answers == "target"  # else the weights need not be there
    return {
        "schema": SCHEMA,
        "source": source,
        "settings": {name: getattr(config, name) for name in decisive_settings(config)},
        "prompts": {"path": config.prompts, "sha256": digest.hexdigest(), "count": len(samples)},
        "target": {"path": config.target} | identity(config.target, decides, config.trust_remote_code),
        "shards": shards,
        "left_out": own,
        "versions": {name: version(name) for name in ("draftsmith", "torch", "transformers")},
    }
