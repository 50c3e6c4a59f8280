"""On-policy text: the draft continues the prompts of a batch itself, and the target scores what it wrote.

Generalized knowledge distillation (Agarwal et al. 2023, algorithm 1) and DistillSpec (Zhou et al. 2023, section 4.2)
train a student on its own text, so that it meets its own mistakes.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.train.data.collator import IGNORED


def coin(*seeds: int) -> float:
    """Return a number in [0, 1) that depends on its seeds alone: the same on every process, and after a resume."""
    return _mixed(*seeds) / 2**63


def prompts_of(batch: dict[str, Tensor]) -> list[Tensor]:
    """Return the token ids of each sample up to its first loss token, packed rows taken apart."""
    prompts = []
    for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        starts = [0]
        if "position_ids" in batch:
            starts = (batch["position_ids"][row] == 0).nonzero()[:, 0].tolist()
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            inside = (labels[start:end] != IGNORED).nonzero()[:, 0]
            if len(inside):  # padding behind packed samples has none
                prompts.append(ids[start : start + int(inside[0])])
    return prompts


@torch.no_grad()
def continued(
    draft: PreTrainedModel,
    prompts: list[Tensor],
    generation: GenerationConfig,
    max_length: int | None,
    seeds: tuple[int, ...],
    synced: bool,
) -> dict[str, Tensor]:
    """Let the draft continue prompts by batched, cached sampling, and return a batch to train on.

    Args:
        draft: in any mode; it samples in eval mode and is handed back as it was.
        prompts: B prompts, each at least one token long.
        generation: says how to sample; `eos_token_id` is a list, or None.
        max_length: of prompt and continuation together.
        seeds: make the draws depend on nothing else.
        synced: go on with empty forwards until every process is done, for a draft that is sharded over them.

    Returns:
        `input_ids`, `attention_mask` and `labels`, each (B, T) int64, padded on the right; labels are −100 on prompts
        and padding.
    """
    device, width = prompts[0].device, max(map(len, prompts))
    pad: Any = generation.pad_token_id
    ids = torch.full((len(prompts), width), pad, device=device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    # `generate` fills what a config leaves open from the model's own: its penalties are no part of our sampling.
    training, config = draft.training, draft.generation_config
    draft.eval().generation_config = generation
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(_mixed(*seeds))
        written: Any = draft.generate(  # type: ignore[operator]
            ids, attention_mask=mask, generation_config=generation, synced_gpus=synced
        )
    draft.train(training).generation_config = config
    ends = torch.tensor(generation.eos_token_id or [], device=device, dtype=ids.dtype)
    samples, labels = [], []
    for prompt, row in zip(prompts, written[:, width:], strict=True):
        stops = torch.isin(row, ends).nonzero()[:, 0]
        text = row[: int(stops[0]) + 1] if len(stops) else row
        samples.append(torch.cat([prompt, text])[:max_length])
        labels.append(torch.cat([torch.full_like(prompt, IGNORED), text])[:max_length])

    def padded(rows: list[Tensor], value: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    return {
        "input_ids": padded(samples, pad),
        "attention_mask": padded([torch.ones_like(sample) for sample in samples], 0),
        "labels": padded(labels, IGNORED),
    }


def _mixed(*seeds: int) -> int:
    digest = hashlib.sha256("/".join(map(str, seeds)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
