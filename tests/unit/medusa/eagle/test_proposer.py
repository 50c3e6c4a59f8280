"""Drafts of EAGLE-3 heads that grow: each is what a reference without a cache drafts from the same text.

Chains and trees of one shape are compared with replay, which has none either: `tests/integration/test_every_kind.py`.
"""

import pytest
import torch
from conftest import tiny_llama
from specimens import eagle
from trained_eagle import logits_after

from draftsmith.decode import DynamicTree, Tree, autoregressive_generate, replay_acceptance, speculative_generate
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.draft_tree import GrowingTree, grow_trees
from draftsmith.medusa.eagle.proposer import EagleProposer

VOCAB = 23
TREE = Tree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)])
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [0, 0, 0, 0, 0, 0, 7], [0, 0, 0, 2, 7, 1, 8]])
MASK = torch.tensor([[1] * 7, [0] * 6 + [1], [0] * 3 + [1] * 4])


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0, VOCAB, layers=4, scale=3.0)


class Checked(EagleProposer):
    """Compares each draft with the reference's."""

    checked = 0

    def start(self, task):
        self._of = task
        return super().start(task)

    def propose(self, contexts, draft_lengths):
        drafts = super().propose(contexts, draft_lengths)
        for context, k, draft in zip(contexts, draft_lengths, drafts, strict=True):
            if len(draft.tokens):
                grown = GrowingTree(context.clone(), self.tree)
                for _ in range(k):
                    paths = [[grown.tokens[node] for node in grown._path(node)] for node in grown.frontier]
                    logits = [logits_after(self._of.target, self.heads, context, path) for path in paths]
                    grow_trees([grown], [self._of.sampler], torch.stack(logits)[None])
                    grown.choose_frontier()
                expected, _ = grown.draft(k)
                assert (expected.tokens.tolist(), expected.tree) == (draft.tokens.tolist(), draft.tree)
                self.checked += 1
        return drafts


@pytest.mark.parametrize("throttled", [False, True])
@pytest.mark.parametrize("sample", [False, True])
def test_drafts_are_those_of_the_reference_without_a_cache(target, throttled, sample):
    """If throttled, some rounds draft nothing: more slots than fit in one block are then fed together."""
    proposer = Checked(eagle(target), DynamicTree(3, 8))
    if throttled:
        propose = proposer.propose
        proposer.propose = lambda texts, lengths: propose(texts, [k * (len(texts[0]) % 7 == 0) for k in lengths])
    options = {"max_new_tokens": 24, "do_sample": sample, "eos_token_id": 6}
    out = speculative_generate(target, proposer, IDS, MASK, draft_length=3, seed=3, **options)
    assert proposer.checked > 4 and out.counts.num_draft_tokens
    if not sample:
        assert torch.equal(out.sequences, autoregressive_generate(target, IDS, MASK, **options).sequences)


def test_what_does_not_fit_is_refused(target):
    few, heads = eagle(target, torch.tensor([1, 2])), eagle(target)
    with pytest.raises(InputError, match=r"^tree: expected at most 2 siblings"):
        speculative_generate(target, EagleProposer(few, TREE), IDS[:1], draft_length=2, max_new_tokens=4)
    with pytest.raises(InputError, match=r"^eagle: expected heads with the target's vocab_size"):
        speculative_generate(tiny_llama(0, 40, layers=4), EagleProposer(heads), IDS[:1], max_new_tokens=4)
    for shape, temperature, said in ((DynamicTree(), 0, "drafts of one shape"), (TREE, 1, "chains under sampling")):
        with pytest.raises(InputError, match=said):
            replay_acceptance(target, EagleProposer(heads, shape), [IDS[0]], [2], [2], temperature=temperature)
