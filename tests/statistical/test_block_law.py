"""The law of text that block drafters help to write, exactly (`enumeration`): chains and trees of both layouts."""

from dataclasses import replace

import pytest
import torch
from specimens import TREE, shaken
from statistical.test_enumeration import PROMPTS, ROUNDING, difference, doubly_normed, laws, llama  # noqa: F401
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.decode import HybridProposer, SuffixProposer, Switch, Tree
from draftsmith.medusa import BlockDrafter, BlockProposer

NAMED = torch.tensor([0, 3, 6])


def block(target, **shape):
    return shaken(BlockDrafter.of_target(target, 5, **{"block_size": 3, "markov_rank": 2, **shape}), target)


DRAFTERS = {
    "chain": lambda target: BlockProposer(block(target)),
    "chain, anchor guesses nothing": lambda target: BlockProposer(
        block(target, anchor_guesses=False, markov_rank=0, layers=2)
    ),
    "greedy chain": lambda target: BlockProposer(block(target), greedy=True),
    "tree": lambda target: BlockProposer(block(target, token_map=NAMED), TREE),
    "suffix, block": lambda target: HybridProposer(
        [SuffixProposer(min_match=1), BlockProposer(block(target))], Switch(1)
    ),
}


@pytest.mark.parametrize("form", ["one row", "batch"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_text_has_the_targets_probability(llama, monkeypatch, name, form):  # noqa: F811
    monkeypatch.setattr(LlamaRMSNorm, "forward", doubly_normed)
    alone = form == "one row"
    written, wanted, accepted = laws(
        llama, DRAFTERS[name](llama), "T=0.7 top-k top-p", PROMPTS[: 1 if alone else None], width=1 if alone else 500
    )
    for law, expected in zip(written, wanted, strict=True):
        assert difference(law, expected) < ROUNDING
    assert alone or any(0.02 < share < 0.98 for share in accepted), accepted


class Flattened(BlockProposer):
    """Says that guesses were drawn from flatter laws than they were."""

    def propose(self, contexts, draft_lengths):
        drafts = list(super().propose(contexts, draft_lengths))
        for i, draft in enumerate(drafts):
            if draft.probabilities is not None:
                flat = draft.probabilities.sqrt()
                drafts[i] = replace(draft, probabilities=flat / flat.sum(-1, keepdim=True))
        return drafts


def test_another_q_than_what_was_drawn_from_is_caught(llama, monkeypatch):  # noqa: F811
    monkeypatch.setattr(LlamaRMSNorm, "forward", doubly_normed)
    (law,), (wanted,), _ = laws(llama, Flattened(block(llama)), "T=0.7 top-k top-p", PROMPTS[:1], width=1)
    assert difference(law, wanted) > 1e-4


def test_a_chain_is_a_tree_of_one_branch(llama, monkeypatch):  # noqa: F811
    monkeypatch.setattr(LlamaRMSNorm, "forward", doubly_normed)
    (law,), (wanted,), _ = laws(
        llama, BlockProposer(block(llama), Tree.chain(2)), "T=0.7 top-k top-p", PROMPTS[:1], width=1
    )
    assert difference(law, wanted) < ROUNDING
