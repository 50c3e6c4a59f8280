"""The law of text that block drafters help to write, exactly (`enumeration`): a wrong q is caught, a chain is a tree.

The shapes themselves are among those of `test_enumeration`.
"""

from dataclasses import replace

from specimens import block
from statistical.test_enumeration import PROMPTS, ROUNDING, difference, doubly_normed, laws, llama  # noqa: F401
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.decode import Tree
from draftsmith.medusa import BlockProposer


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
