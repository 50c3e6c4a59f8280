"""Completions by a model in this process: a queue of prompts, each in the row that the one before it has left."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode import autoregressive_generate
from draftsmith.decode.cache import check_rollback, rotary_limit, rotate_by_text
from draftsmith.decode.errors import InputError
from draftsmith.decode.options import Sampling
from draftsmith.train.checkpoint import end_of_sequence_ids
from draftsmith.train.data.samples import Completion, mixed_seed


def complete(
    model: PreTrainedModel,
    generation: GenerationConfig,
    prompt_ids: Sequence[list[int]],
    seed: int,
    *,
    rows: int | None = None,
    device: torch.device | None = None,
    synced: bool = False,
    begun: Sequence[list[int]] | None = None,
    observer: Callable[[int, list[int], bool], None] | None = None,
) -> list[Completion]:
    """Complete prompts together; the tokens are a function of the arguments only, whatever was sampled before.

    Where our own decoder does not know the architecture, `rows` prompts at a time are left to the library's `generate`;
    one at a time where its rotary frequencies follow the longest text, and the text is too long for our own.

    Args:
        model: a causal LM, in eval mode.
        generation: says how to sample; its `eos_token_id` is a list, or None.
        prompt_ids: prompts, each at least one token long.
        seed: of the sampling.
        rows: prompts that are decoded at a time; all if None.
        device: where the model computes; where its weights are if None.
        synced: continue with empty forwards until every process is done, for a model that is sharded over them.
        begun: what an earlier call with the same arguments had written behind each prompt when it was stopped.
        observer: called with a prompt's place, tokens that were written behind it, and whether its text has ended.

    Returns:
        A completion of each prompt, without padding.
    """
    device, ends = device or model.device, set(generation.eos_token_id or [])
    rows, own = rows or len(prompt_ids), []
    if not synced:
        new = int(generation.max_new_tokens or 0)
        own = [refills_rows(model, len(ids) + new) for ids in prompt_ids]
        if any(own) and not all(own):
            some = partial(complete, model, generation, seed=seed, rows=rows, device=device)
            return _complete_apart(own, some, prompt_ids, begun, observer)
    if not own or not own[0]:
        rows = 1 if rotate_by_text(model) and not synced else rows
        written: list[list[int]] = []
        for at in range(0, len(prompt_ids), rows):
            batch, there = prompt_ids[at : at + rows], [] if begun is None else begun[at : at + rows]
            if all(there) and there:  # a batch ends as a whole
                written += there
                continue
            for place, ids in enumerate(by_library(model, generation, batch, mixed_seed(seed, at), device, synced), at):
                written.append(ids)
                if observer is not None:
                    known = there[place - at] if there else []
                    observer(place, ids[len(known) :], True)
    else:
        input_ids, attention_mask = _left_padded(prompt_ids, generation, device)
        output = autoregressive_generate(
            model,
            input_ids,
            attention_mask,
            seed,
            rows=rows,
            begun=begun,
            observer=None if observer is None else lambda row, token: observer(row.index, [token], row.done),
            generation_config=generation,
        )
        lengths, start = [counts.num_emitted_tokens for counts in output.row_counts], input_ids.shape[1]
        texts = output.sequences[:, start:].tolist()
        written = [ids[:length] for ids, length in zip(texts, lengths, strict=True)]
    return [Completion(ids, "stop" if ids[-1] in ends else "length") for ids in written]


def _complete_apart(
    own: Sequence[bool],
    complete_some: Callable[..., list[Completion]],
    prompt_ids: Sequence[list[int]],
    begun: Sequence[list[int]] | None,
    observer: Callable[[int, list[int], bool], None] | None,
) -> list[Completion]:
    """Complete the prompts that our own decoder can decode, and then the others."""
    found: dict[int, Completion] = {}
    for ours in (True, False):
        places = [place for place, each in enumerate(own) if each == ours]
        observe = observer and (lambda at, *seen, places=places: observer(places[at], *seen))
        there = begun and [begun[place] for place in places]
        completions = complete_some([prompt_ids[place] for place in places], begun=there, observer=observe)
        found |= dict(zip(places, completions, strict=True))
    return [found[place] for place in range(len(own))]


def refills_rows(model: PreTrainedModel, longest: int) -> bool:
    """Say whether our own decoder can decode texts of `longest` tokens with a model."""
    try:
        check_rollback(model, "target")
    except InputError:
        return False
    limit = rotary_limit(model)
    return limit is None or longest < limit[1]


def by_library(
    model: PreTrainedModel,
    generation: GenerationConfig,
    prompt_ids: Sequence[list[int]],
    seed: int,
    device: torch.device,
    synced: bool = False,
) -> list[list[int]]:
    """Complete prompts by the library's `generate`, which runs until the longest has ended."""
    input_ids, attention_mask = _left_padded(prompt_ids, generation, device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        sequences: Any = model.generate(  # type: ignore[operator]
            input_ids, attention_mask=attention_mask, generation_config=generation, synced_gpus=synced
        )
    ends = set(generation.eos_token_id or [])
    rows = sequences[:, input_ids.shape[1] :].tolist()
    return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))] for row in rows]


def _left_padded(
    prompt_ids: Sequence[list[int]], generation: GenerationConfig, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts in one tensor, and its mask, (B, T) each."""
    width, pad = max(map(len, prompt_ids)), generation.pad_token_id
    padding = [width - len(ids) for ids in prompt_ids]
    input_ids = torch.tensor([[pad] * n + ids for n, ids in zip(padding, prompt_ids, strict=True)])
    attention_mask = (torch.arange(width) >= torch.tensor(padding)[:, None]).long()
    return input_ids.to(device), attention_mask.to(device)


def set_generation_config(
    settings: Sampling, max_new_tokens: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int
) -> GenerationConfig:
    """Replace a model's generation config by one that samples as the settings say, and return it.

    `generate` fills whatever a config leaves open from the model's generation_config (a temperature, a repetition
    penalty, …) and then from the library's defaults (top_k=50). So the model's is replaced, its end-of-sequence ids
    kept, and every setting that we have is written out.

    Args:
        settings: how to sample.
        max_new_tokens: of a completion.
        model: the target.
        tokenizer: the target's.
        tokens: how many of its logits are tokens (`token_count`).
    """
    ends = end_of_sequence_ids(model.generation_config, tokenizer)
    # Rows that pad the vocabulary to a round number are no tokens, but an untruncated distribution reaches them.
    no_tokens = list(range(tokens, model.config.get_text_config().vocab_size))
    model.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=no_tokens or None,
        **settings.generate_kwargs(),
    )
    return model.generation_config
