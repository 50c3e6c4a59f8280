"""On-policy text: the draft continues the prompts of a batch itself, and the target scores what it wrote.

Generalized knowledge distillation (Agarwal et al. 2023, algorithm 1) and DistillSpec (Zhou et al. 2023, section 4.2)
train a student on text that it wrote itself, so that it meets its mistakes.
"""

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.train.data.decoding import complete
from draftsmith.train.losses.positions import IGNORED


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


def continued(
    draft: PreTrainedModel,
    prompts: list[Tensor],
    generation: GenerationConfig,
    max_length: int | None,
    seed: int,
    synced: bool,
) -> list[dict[str, list[int]]]:
    """Let the draft continue prompts by batched, cached sampling, and return samples to train on.

    Args:
        draft: in any mode; it samples in eval mode and is handed back as it was.
        prompts: B prompts, each at least one token long.
        generation: says how to sample; `eos_token_id` is a list, or None.
        max_length: of prompt and continuation together.
        seed: of the sampling, which depends on nothing else.
        synced: continue with empty forwards until every process is done, for a draft that is sharded over them.

    Returns:
        `input_ids` and `labels` of B samples; labels are −100 on prompts.
    """
    # `generate` fills what a config leaves open from the model's: its penalties are no part of our sampling.
    training, config = draft.training, draft.generation_config
    draft.eval().generation_config = generation
    ids = [prompt.tolist() for prompt in prompts]
    completions = complete(draft, generation, ids, seed, device=prompts[0].device, synced=synced)
    draft.train(training).generation_config = config
    return [
        {
            "input_ids": (prompt + completion.ids)[:max_length],
            "labels": ([IGNORED] * len(prompt) + completion.ids)[:max_length],
        }
        for prompt, completion in zip(ids, completions, strict=True)
    ]
