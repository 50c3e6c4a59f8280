"""Completions written by the target, the text that a draft learns from because it will draft such text.

The target writes them here or on a server, or they are given. An output directory holds Parquet shards and a
`manifest.json` (`"draftsmith.completions/1"`) with the settings and inputs that determine every token. One process
completes the prompts of a shard as one queue, seeded by the shard's index, and renames the finished file into place. So
a killed run can resume with any number of processes, and ends with the bytes of an uninterrupted run of one process
(with a server, as far as the server repeats itself).
"""

import hashlib
import json
import logging
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from draftsmith.decode.clock import speed
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import Phase, phase, track
from draftsmith.train.checkpoint import end_of_sequence_ids, load_generation_config, unapplied_settings
from draftsmith.train.data.chat.masks import ClosingTokens, MaskedConversation
from draftsmith.train.data.corpus import write_prompts
from draftsmith.train.data.decoding import complete, set_generation_config
from draftsmith.train.data.prepare_config import SHARD_BATCHES, decisive_settings
from draftsmith.train.data.prepare_config import PrepareConfig as PrepareConfig
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.data.prompts import (
    ALL_TURNS,
    Prompt,
    answer_texts,
    encode_prompt,
    encode_prompts,
    mask_answers,
    usable,
)
from draftsmith.train.data.samples import Completion, Sample, ShardBatch, make_batches, mixed_seed
from draftsmith.train.data.samples import CompletionsSummary as CompletionsSummary
from draftsmith.train.data.shards import (
    MANIFEST,
    SCHEMA,
    check_samples,
    completion_files,
    output_directory,
    read_completions,
    read_manifest,
    read_shard,
    settle_manifest,
    write_shard,
)
from draftsmith.train.endpoint.completions import Vocabulary, complete_remotely, served_model
from draftsmith.train.files import identity, require_writable
from draftsmith.train.job.processes import Processes, join_launched, terminable
from draftsmith.train.models import check_head, load_config, load_model, load_tokenizer, resolve_dtype

logger = logging.getLogger(__name__)


def prepare(config: PrepareConfig) -> CompletionsSummary:
    """Complete every prompt with the target, a shard at a time, except the shards of an earlier run.

    Each of several launched processes writes its share of the shards. The summary is that of all processes.

    Raises:
        InputError: the prompts, target, server, output directory or disk cannot be used; finished shards are kept.
    """
    with join_launched() as processes, terminable():
        if processes.first and config.answers == "target":
            target_config = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
            unapplied_settings(load_generation_config(config.target, target_config, field="target"), config.target)
        asks_later = config.turns == "all" and config.answers == "target"
        summary = (_prepare_turns if asks_later else _prepare)(config, processes)
    done = summary.kept + summary.written
    if processes.first and summary.cut > done / 2:  # a draft would not learn how texts end
        logger.warning(
            "%d of %d completions were cut at max_new_tokens: raise it, or check that the target can end its texts "
            "(chat template, end-of-sequence ids)",
            summary.cut,
            done,
        )
    return summary


def _prepare_turns(config: PrepareConfig, processes: Processes) -> CompletionsSummary:
    """Complete the first turn of all prompts, then the next turn of those that have one, and so on."""
    invalid = config.invalid_prompts
    prompts = read_prompts(config.prompts, split=config.split, limit=config.limit, later=True, invalid=invalid)
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    model_config = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    output, number, summaries, records = Path(config.output), 0, list[CompletionsSummary](), list[dict[str, Any]]()
    too_long = list[str]()
    processes.after_the_first(partial(require_writable, output))
    while prompts:
        number += 1
        turns = [{"id": f"{prompt.id}.{number}"} | prompt.record() for prompt in prompts]
        records += turns
        path, directory = output / f"turn-{number}.jsonl", output / f"turn-{number}"
        processes.after_the_first(partial(write_prompts, path, turns))
        processes.require_shared(path)
        turn = replace(config, prompts=str(path), output=str(directory), split="train", limit=None)
        summaries.append(_prepare(turn, processes))
        answers = answer_texts(list(load_completions(str(directory))), number, tokenizer)
        templated = tokenizer.chat_template is not None
        prompts = [prompt.next_turn(answers[prompt.id], templated) for prompt in prompts if prompt.later]
        if limit is not None and config.max_prompt_tokens is None:
            room = limit - config.new_tokens(limit)
            fits = [len(encode_prompt(prompt, tokenizer, **config.encoding)) <= room for prompt in prompts]
            too_long += [f"{prompt.id}.{number + 1}" for prompt, fit in zip(prompts, fits, strict=True) if not fit]
            prompts = [prompt for prompt, fit in zip(prompts, fits, strict=True) if fit]
    processes.after_the_first(partial(write_prompts, output / ALL_TURNS, records))
    summary = CompletionsSummary.of_turns(output, summaries)
    summary.left_out += too_long
    return summary


def _prepare(config: PrepareConfig, processes: Processes) -> CompletionsSummary:
    """Write this process's share of the shards; return the summary of all processes when they have finished."""
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    if config.endpoint is None and config.answers == "target":  # before the manifest, which names the dtype
        dtype = resolve_dtype(config.dtype, config.target, trust_remote_code=config.trust_remote_code)
        config = replace(config, dtype=dtype)
    output = Path(config.output)
    model_config = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
    check_head(model_config, tokenizer, "target")
    # Not every architecture has a limit of positions; past its limit, a target writes noise or fails.
    text_config = model_config.get_text_config()
    limit, size = getattr(text_config, "max_position_embeddings", None), text_config.vocab_size
    shard_size = config.shard_size or SHARD_BATCHES * config.batch_size
    new_tokens = config.new_tokens(limit)
    config = replace(config, shard_size=shard_size, max_new_tokens=new_tokens)
    summary = CompletionsSummary(output, 0)
    source: dict[str, Any] = {"answers": config.answers}
    generation_config = load_generation_config(config.target, model_config, field="target")
    ignored = unapplied_settings(generation_config) if config.answers == "target" else []
    if config.answers == "given":
        samples = _given(config, tokenizer, size, limit, end_of_sequence_ids(generation_config, tokenizer), summary)
    else:
        samples = _prompts(config, tokenizer, size, limit, new_tokens)
    summary.prompts = len(samples)
    batches = make_batches(samples, shard_size)
    if config.endpoint is not None:
        source |= {"endpoint": config.endpoint, "model": served_model(config)}
    with output_directory(output, lambda: str(summary), processes.first):
        manifest = _manifest(config, source, samples, len(batches), ignored)
        processes.after_the_first(lambda: settle_manifest(output, manifest))
        processes.require_shared(output / MANIFEST)
        missing = []
        for batch in track(processes.share(batches), "shards that are there", "shards"):
            shard = read_shard(output / batch.shard)
            if shard is not None and shard["id"].to_pylist() == batch.names:
                summary.add(shard)
                summary.kept += len(batch.samples)
            else:
                missing.append(batch)
        if missing:
            ends = end_of_sequence_ids(generation_config, tokenizer)
            _complete(config, tokenizer, model_config, source.get("model"), ends, missing, summary, processes)
        return CompletionsSummary.over(processes.gathered(summary))


def load_completions(path: str, vocab_size: int | None = None) -> Dataset:
    """Read the completions that `prepare` wrote; of an unfinished directory those that are there, with a warning.

    The columns are `id`, `category`, `prompt_length`, `input_ids`, `loss_mask` and `finish_reason`.

    Raises:
        InputError: there are no completions, a damaged shard, a repeated sample, or an id not below `vocab_size`.
    """
    samples = pa.concat_tables([read_completions(file, vocab_size) for file in completion_files(path)])
    check_samples(path, samples["id"])
    return Dataset(samples)


def other_target(path: str, target: str) -> str | None:
    """Return the target that wrote completions if it differs from `target` by its config and weights, else None."""
    written = (read_manifest(Path(path)) or {}).get("target", {})
    current = identity(target)
    differs = any(
        written[name] != current[name] for name in written.keys() & current.keys() - {"generation_config.json"}
    )
    return str(written.get("path")) if differs else None


def _prompts(
    config: PrepareConfig, tokenizer: PreTrainedTokenizerBase, size: int, limit: int | None, new_tokens: int
) -> list[Sample]:
    """Encode the prompts; each must leave room for its completion within the target's positions."""
    invalid = config.invalid_prompts
    prompts = read_prompts(config.prompts, split=config.split, limit=config.limit, invalid=invalid)
    prompts, ids = encode_prompts(prompts, tokenizer, size, invalid, **config.encoding)
    samples = [
        Sample(p if n == 1 else replace(p, id=f"{p.id}#{n}"), prompt_ids, temperature=temperature)
        for n, temperature in enumerate(config.plan(), 1)
        for p, prompt_ids in zip(prompts, ids, strict=True)
    ]
    sources = dict[str, str]()  # several samples of a prompt "a" may repeat the id of another prompt "a#2"
    for sample, prompt in zip(samples, prompts * len(config.plan()), strict=True):
        if (first := sources.setdefault(sample.prompt.id, prompt.id)) != prompt.id:
            raise InputError(
                f"prompts: expected ids that differ with their samples' numbers after them, found "
                f"{sample.prompt.id!r} of {first!r} and of {prompt.id!r}"
            )
    longest = max(samples, key=lambda sample: len(sample.ids))
    if limit is not None and len(longest.ids) + new_tokens > limit:
        raise InputError(
            f"max_prompt_tokens: expected prompt and completion within the target's {limit} positions, found "
            f"{len(longest.ids)} + {new_tokens} tokens for prompt {longest.prompt.id!r}; "
            f"give max_prompt_tokens: {max(limit - new_tokens, 1)}, or a smaller max_new_tokens"
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
    """Encode the conversations that fit the target's positions, and mask the assistant's tokens.

    With all turns, a conversation is a sample for each context in which turns were written, whose id ends in a turn's
    number.
    """
    samples, reasons, each = list[Sample](), set[str](), config.turns == "all"
    invalid, template = config.invalid_prompts, config.template | {"whole": not each}
    read = read_prompts(config.prompts, split=config.split, limit=config.limit, answers="required", invalid=invalid)
    stops = {None, tokenizer.eos_token_id, *ends}  # a server may end answers with tokens of the request
    unfinished = {conversation.id: None for conversation in read if conversation.cut or conversation.stop not in stops}
    summary.unfinished += unfinished
    whole = [conversation for conversation in read if conversation.id not in unfinished]
    closing = ClosingTokens.of(tokenizer)

    def masked(conversation: Prompt) -> list[MaskedConversation]:
        return mask_answers(conversation, tokenizer, size, closing, ends, **template)

    for conversation, contexts in usable(whole, masked, invalid, "conversations"):
        for context in contexts:
            named = replace(conversation, id=f"{conversation.id}.{context.turn}") if each else conversation
            reasons.update(context.left_out.values())
            if limit is not None and len(context.ids) > limit:  # if cut, it would teach answers that end in the middle
                summary.left_out.append(named.id)
            else:
                samples.append(Sample(named, context.ids, context.mask))
    names = [sample.prompt.id for sample in samples]
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise InputError(f"prompts: expected ids that differ with turns' numbers after them, found {twice!r} twice")
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
    """Write the missing shards, of given conversations or of completions by a server or by the target here."""
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
        for batch in track(missing, processes.title("prepare"), "shards"):
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
        quantization=config.target_quantization,
    )
    with phase(processes.title("prepare"), texts * most, "tokens") as writing:
        counted = WritingProgress(writing, texts, most)
        for batch in missing:
            temperature = batch.samples[0].temperature
            sampling = config if temperature is None else config.at(temperature)
            generation = set_generation_config(sampling, most, model, tokenizer, tokens)
            written = Counter[int]()

            def observe(index: int, tokens: list[int], ended: bool, written: Counter[int] = written) -> None:
                written[index] += len(tokens)
                counted.add(len(tokens), written[index] if ended else None)

            queue, seed = [sample.ids for sample in batch.samples], mixed_seed(config.seed, batch.index)
            finished(batch, complete(model, generation, queue, seed, rows=config.batch_size, observer=observe))


class WritingProgress:
    """A progress bar over tokens, out of `texts` × `most` at most, that also counts finished texts."""

    def __init__(self, phase: Phase, texts: int, most: int):
        self._phase, self._texts, self._most = phase, texts, most
        self._ended = self._tokens = 0
        self._start = time.perf_counter()

    def add(self, tokens: int, ended: int | None = None) -> None:
        """Count written tokens; `ended` is the length of a text that they finish."""
        self._tokens += tokens
        if ended is not None:
            self._ended += 1
            self._phase.total = (self._phase.total or 0) - (self._most - ended)
        rate = self._tokens / max(time.perf_counter() - self._start, 1e-9)
        self._phase.advance(tokens, f"{self._ended} of {self._texts} texts, {speed(rate)} tokens/s")


def _manifest(
    config: PrepareConfig, source: dict[str, Any], samples: list[Sample], shards: int, ignored: list[str]
) -> dict[str, Any]:
    """Return everything that determines the completions' tokens; paths and versions are for information."""
    digest = hashlib.sha256()
    for sample in samples:
        mask = [] if sample.mask is None else [sample.mask]
        temperature = [] if sample.temperature is None else [f"temperature {sample.temperature}"]
        digest.update(json.dumps([sample.prompt.id, sample.prompt.category, sample.ids, *mask, *temperature]).encode())
    decides = config.endpoint is None and config.answers == "target"  # in other cases the weights may be missing here
    return {
        "schema": SCHEMA,
        "source": source,
        "settings": {name: getattr(config, name) for name in decisive_settings(config)},
        "prompts": {"path": config.prompts, "sha256": digest.hexdigest(), "count": len(samples)},
        "target": {"path": config.target} | identity(config.target, decides),
        "shards": shards,
        "left_out": ignored,
        "versions": {name: version(name) for name in ("draftsmith", "torch", "transformers")},
    }
