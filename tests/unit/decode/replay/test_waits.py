"""Replay on tensors without data: a value that is looked at, for which a GPU would make the host wait, raises.

What the host reads are copies of a text's or a batch's whole answers, and how many there are is counted.
"""

from collections.abc import Callable

import pytest
import torch
from conftest import tiny_llama
from torch import Tensor
from trained_parallel import as_parallel

from draftsmith.decode import DraftModelProposer, ParallelDraftProposer, Proposer, Tree, replay_acceptance
from draftsmith.medusa import MedusaHeads, MedusaProposer
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.proposer import EagleProposer

TREE = Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
CHAIN = Tree.chain(3)
TARGET = tiny_llama(0, layers=4, hidden=64)
TEXTS = [torch.arange(5, 30), torch.arange(7, 20), torch.arange(3, 40)]
# Of each the drafter, the copies a batch of texts, and those a text, beside the one that checks whose the text is.
DRAFTERS: dict[str, tuple[Callable[[], Proposer], int, int]] = {
    "draft": (lambda: DraftModelProposer(tiny_llama(1).to("meta")), 1, 0),
    "draft, tree": (lambda: DraftModelProposer(tiny_llama(1).to("meta"), TREE), 2, 0),  # ranks, and first choices
    "parallel": (lambda: ParallelDraftProposer(as_parallel(tiny_llama(1), 90, 4).to("meta")), 0, 1),
    "parallel, tree": (lambda: ParallelDraftProposer(as_parallel(tiny_llama(1), 90, 4).to("meta"), TREE), 0, 1),
    "Medusa": (lambda: MedusaProposer(MedusaHeads.of_target(TARGET, 3).to("meta"), CHAIN), 0, 1),
    "Medusa, tree": (lambda: MedusaProposer(MedusaHeads.of_target(TARGET, 3).to("meta"), TREE), 0, 1),
    "Hydra": (lambda: MedusaProposer(MedusaHeads.of_target(TARGET, 3, hydra=True).to("meta"), CHAIN), 0, 1),
    "EAGLE-3": (lambda: EagleProposer(EagleHeads.of_target(TARGET).to("meta")), 0, 1),
    "EAGLE-3, tree": (lambda: EagleProposer(EagleHeads.of_target(TARGET).to("meta"), TREE), 0, 1),
}


# Under sampling trees are decoded, not replayed.
CASES = [(name, t) for name in DRAFTERS for t in (0.0, 1.0) if t == 0 or "tree" not in name]


@pytest.mark.parametrize(("name", "temperature"), CASES)
def test_replay_looks_at_no_value_but_its_answers(monkeypatch, name, temperature):
    make, of_batch, of_text = DRAFTERS[name]
    proposer, sampled = make(), temperature > 0
    if sampled and name == "parallel":
        of_batch, of_text = 1, 0  # probabilities, in place of a text's ranks
    target = tiny_llama(0, layers=4, hidden=64).to("meta")
    copies = []

    def copied(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        copies.append(tensor)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    monkeypatch.setattr(Tensor, "cpu", copied)
    replay = replay_acceptance(target, proposer, TEXTS, [5, 1, 9], [1, 3], temperature)
    assert len(replay.texts) == 3
    checks = 2 if sampled else 1  # what rounding cut off, and whether the text can be the target's
    assert len(copies) == of_batch + (of_text + checks) * len(TEXTS)
