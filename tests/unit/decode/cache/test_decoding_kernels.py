"""Decoding in bfloat16 by the kernels that CUDA would choose: under no drafter does attention fall to math."""

from collections.abc import Callable

import pytest
import torch
from conftest import tiny_llama
from trained_parallel import as_parallel

from draftsmith.decode import (
    DraftModelProposer,
    LookaheadProposer,
    ParallelDraftProposer,
    PromptLookupProposer,
    Proposer,
    Tree,
    speculative_generate,
)
from draftsmith.decode.cache.kernels import CudaKernels
from draftsmith.medusa import MedusaHeads, MedusaProposer
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.proposer import EagleProposer

TREE = Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
PROMPTS = {"one": [[5, 6, 7]], "ragged rows": [[0, 0, 5, 6, 7], [3, 1, 4, 1, 5]]}


def model(seed: int, layers: int = 4) -> torch.nn.Module:
    """Of four query heads in two groups, as wide as kernels want them."""
    return tiny_llama(seed, layers=layers, hidden=64).to(torch.bfloat16)


TARGET = model(0)
DRAFTERS: dict[str, Callable[[], Proposer]] = {
    "draft": lambda: DraftModelProposer(model(1, 1)),
    "draft, tree": lambda: DraftModelProposer(model(1, 1), TREE),
    "parallel": lambda: ParallelDraftProposer(as_parallel(model(1, 1), 90, 4)),
    "lookup": PromptLookupProposer,
    "lookahead": LookaheadProposer,
    "Medusa": lambda: MedusaProposer(MedusaHeads.of_target(TARGET, 3), TREE),
    "Hydra": lambda: MedusaProposer(MedusaHeads.of_target(TARGET, 3, hydra=True), TREE),
    "EAGLE-3": lambda: EagleProposer(EagleHeads.of_target(TARGET)),
    "EAGLE-3, tree": lambda: EagleProposer(EagleHeads.of_target(TARGET), TREE),
}


@pytest.mark.parametrize("rows", PROMPTS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_no_drafter_s_rounds_fall_to_the_math_kernel(name, rows):
    prompts = torch.tensor(PROMPTS[rows])
    with CudaKernels() as kernels:
        speculative_generate(
            TARGET, DRAFTERS[name](), prompts, (prompts != 0).long(), draft_length=3, max_new_tokens=8, do_sample=False
        )
    assert len(kernels.chosen) > 8 and "math" not in kernels.chosen, set(kernels.chosen)
