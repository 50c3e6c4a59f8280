"""EAGLE-3's proposer: what it refuses, and its compiled forwards; `test_every_kind` has its drafts."""

import pytest
import torch
from conftest import tiny_llama
from specimens import eagle

from draftsmith.decode import Tree, replay_acceptance, speculative_generate
from draftsmith.decode.errors import InputError
from draftsmith.medusa.eagle.proposer import EagleProposer

VOCAB = 23
TREE = Tree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)])
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [0, 0, 0, 0, 0, 0, 7], [0, 0, 0, 2, 7, 1, 8]])
MASK = torch.tensor([[1] * 7, [0] * 6 + [1], [0] * 3 + [1] * 4])


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0, VOCAB, layers=4, scale=3.0)


def test_what_does_not_fit_is_refused(target):
    few, heads = eagle(target, torch.tensor([1, 2])), eagle(target)
    with pytest.raises(InputError, match=r"^tree: expected at most 2 siblings"):
        speculative_generate(target, EagleProposer(few, TREE), IDS[:1], draft_length=2, max_new_tokens=4)
    with pytest.raises(InputError, match=r"^eagle: expected heads with the target's vocab_size"):
        speculative_generate(tiny_llama(0, 40, layers=4), EagleProposer(heads), IDS[:1], max_new_tokens=4)
    with pytest.raises(InputError, match="chains under sampling"):
        replay_acceptance(target, EagleProposer(heads, TREE), [IDS[0]], [2], [2], temperature=1)
