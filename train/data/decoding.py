"""Completions by a model in this process, from a queue of prompts: each takes the row of one that has ended."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
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
    observer: Callable[[int, list[int], bool], None] | None = None,
) -> list[Completion]:
    """Complete prompts together; the tokens depend on the arguments only.

    Architectures that our decoder does not know are left to the library's `generate`, `rows` prompts at a time; or one
    at a time if the rotary frequencies follow the longest text and this text is too long for our decoder.

    The model is in eval mode; `generation.eos_token_id` is a list or None. `rows` prompts are decoded at a time, all if
    None. `synced` continues with empty forwards until every process is done, for a model sharded over them. `observer`
    is called with a prompt's index, new tokens after it, and whether its text has ended.
    """
    device, ends = device or model.device, set(generation.eos_token_id or [])
    rows, own = rows or len(prompt_ids), []
    if not synced:
        new = int(generation.max_new_tokens or 0)
        own = [can_decode(model, len(ids) + new) for ids in prompt_ids]
        if any(own) and not all(own):
            complete_part = partial(complete, model, generation, seed=seed, rows=rows, device=device)
            return _complete_apart(own, complete_part, prompt_ids, observer)
    if not own or not own[0]:
        rows = 1 if rotate_by_text(model) and not synced else rows
        written: list[list[int]] = []
        for at in range(0, len(prompt_ids), rows):
            batch = prompt_ids[at : at + rows]
            for row, ids in enumerate(by_library(model, generation, batch, mixed_seed(seed, at), device, synced)):
                written.append(ids)
                if observer is not None:
                    observer(at + row, ids, True)
    else:
        input_ids, attention_mask = left_padded(prompt_ids, device, generation.pad_token_id)
        output = autoregressive_generate(
            model,
            input_ids,
            attention_mask,
            seed,
            rows=rows,
            observer=None if observer is None else lambda row, token: observer(row.index, [token], row.done),
            generation_config=generation,
        )
        lengths, start = [counts.num_emitted_tokens for counts in output.row_counts], input_ids.shape[1]
        texts = output.sequences[:, start:].tolist()
        written = [ids[:length] for ids, length in zip(texts, lengths, strict=True)]
    return [Completion(ids, "stop" if ids[-1] in ends else "length") for ids in written]


def _complete_apart(
    own: Sequence[bool],
    complete_part: Callable[..., list[Completion]],
    prompt_ids: Sequence[list[int]],
    observer: Callable[[int, list[int], bool], None] | None,
) -> list[Completion]:
    """Complete first the prompts that our own decoder can decode, then the others."""
    completions: dict[int, Completion] = {}
    for ours in (True, False):
        part = [index for index, is_own in enumerate(own) if is_own == ours]
        observe = observer and (lambda at, *event, part=part: observer(part[at], *event))
        written = complete_part([prompt_ids[index] for index in part], observer=observe)
        completions |= dict(zip(part, written, strict=True))
    return [completions[index] for index in range(len(own))]


def can_decode(model: PreTrainedModel, longest: int) -> bool:
    """Return whether our decoder can decode texts of `longest` tokens with a model."""
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
    """Complete prompts by the library's `generate`, which runs until the longest text has ended."""
    input_ids, attention_mask = left_padded(prompt_ids, device, generation.pad_token_id)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        sequences: Any = model.generate(  # type: ignore[operator]
            input_ids, attention_mask=attention_mask, generation_config=generation, synced_gpus=synced
        )
    ends = set(generation.eos_token_id or [])
    rows = sequences[:, input_ids.shape[1] :].tolist()
    return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))] for row in rows]


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device, pad: int = 0) -> tuple[Tensor, Tensor]:
    """Return prompts in one tensor, padded on the left, and its mask, both (B, T)."""
    width = max(map(len, prompts))
    padding = [width - len(ids) for ids in prompts]
    input_ids = torch.tensor([[pad] * n + list(ids) for n, ids in zip(padding, prompts, strict=True)])
    attention_mask = (torch.arange(width) >= torch.tensor(padding)[:, None]).long()
    return input_ids.to(device), attention_mask.to(device)


def set_generation_config(
    settings: Sampling, max_new_tokens: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int
) -> GenerationConfig:
    """Replace a model's generation config by one with the given sampling, and return it.

    `generate` fills settings that a config leaves open from the model's generation_config (a temperature, a repetition
    penalty, …) and then from the library's defaults (top_k=50). So the new config keeps only the end-of-sequence ids,
    and writes out every setting that we have. `tokens` is the number of logits that are tokens (`token_count`).
    """
    ends = end_of_sequence_ids(model.generation_config, tokenizer)
    # Rows that pad the vocabulary to a round number are no tokens, but untruncated sampling reaches them.
    padding_ids = list(range(tokens, model.config.get_text_config().vocab_size))
    model.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=padding_ids or None,
        **settings.generate_kwargs(),
    )
    return model.generation_config
