"""On-policy text: the draft continues the prompts of a batch, and the target scores the continuations.

Generalized knowledge distillation (Agarwal et al. 2023, algorithm 1) and DistillSpec (Zhou et al. 2023, section 4.2)
train a student on its own text, so that it meets its mistakes.
"""

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.train.data.decoding import complete
from draftsmith.train.losses.positions import IGNORED


def prompts_of(batch: dict[str, Tensor]) -> list[Tensor]:
    """Return the token ids of each sample before its first loss token; packed rows are separated."""
    prompts = []
    for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        starts = [0]
        if "position_ids" in batch:
            starts = (batch["position_ids"][row] == 0).nonzero()[:, 0].tolist()
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            inside = (labels[start:end] != IGNORED).nonzero()[:, 0]
            if len(inside):  # padding after packed samples has no loss tokens
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
    """Sample the draft's continuations of prompts, and return `input_ids` and `labels`, which are −100 on prompts.

    `eos_token_id` of the generation config is a list or None. `max_length` limits prompt and continuation together.
    `synced` runs empty forwards until every process is done, for a sharded draft.
    """
    # `generate` takes missing fields from the model's own config, whose penalties are not part of our sampling.
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
