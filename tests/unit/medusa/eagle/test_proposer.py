"""Drafts of EAGLE-3 heads: each is what a reference without a cache drafts from the same text."""

import pytest
import torch
from conftest import tiny_llama
from trained_eagle import logits_after, train_eagle

from draftsmith.decode import DynamicTree, Tree, autoregressive_generate, speculative_generate
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.draft_tree import GrowingTree, grow_trees
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.proposer import EagleProposer

VOCAB = 23
TREE = Tree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1)])
SHAPES = {"chain": None, "tree": TREE, "dynamic": DynamicTree(3, 8)}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7], [2, 7, 1, 8]]


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0, VOCAB, layers=4, scale=3.0)


def heads_of(target, **options):
    """Heads that are right now and then."""
    torch.manual_seed(1)
    prompts = torch.randint(VOCAB, (16, 3), generator=torch.Generator().manual_seed(3))
    ways = ({"do_sample": False}, {"do_sample": True, "top_k": 0})
    texts = [autoregressive_generate(target, prompts, max_new_tokens=16, **way).sequences for way in ways]
    return train_eagle(
        target, EagleHeads.of_target(target, **options), list(torch.cat(texts)), steps=30, rate=1e-2, depth=1
    )


@pytest.fixture(scope="module")
def trained(target):
    return {name: heads_of(target, **options) for name, options in OPTIONS.items()}


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
                self.check(context.clone(), k, draft)
        return drafts

    def check(self, context, k, draft):
        assert draft.tree.depth <= k
        sampler, tokens = self._of.sampler, draft.tokens.tolist()
        dense = draft.dense(VOCAB) if sampler.do_sample else draft

        def scores_after(nodes):
            path = [tokens[node] for node in nodes]
            return sampler.scores(logits_after(self._of.target, self.heads, context, path)[None], [context])[0]

        if isinstance(self.tree, DynamicTree):
            grown = GrowingTree(context, self.tree)
            for _ in range(k):
                paths = [[grown.tokens[node] for node in grown._path(node)] for node in grown.frontier]
                logits = torch.stack([logits_after(self._of.target, self.heads, context, p) for p in paths])
                grow_trees([grown], [sampler], logits[None])
                grown.choose_frontier()
            expected, _ = grown.draft(k)
            assert (expected.tokens.tolist(), expected.tree) == (tokens, draft.tree)
        for parent, children in enumerate(draft.tree.children):
            if isinstance(self.tree, DynamicTree) or not children:
                continue
            scores = scores_after(draft.tree.path(parent - 1) if parent else [])
            if not sampler.do_sample:
                assert [tokens[node] for node in children] == scores.topk(len(children)).indices.tolist()
            else:
                torch.testing.assert_close(dense.probabilities[children[0]], scores.softmax(-1), atol=1e-5, rtol=1e-4)
        self.checked += 1


def batch(prompts):
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


OPTIONS = {
    "plain": {},
    "cut": {"token_map": torch.tensor([0, 1, 4, 5, 9, 11, 12, 17, 22])},
    "normed": {"norm_output": True, "norm_before_residual": True, "fc_norm": True, "layer_ids": [1, 4]},
}


SETTINGS = [("plain", shape, rows, sample) for shape in SHAPES for rows in (1, 3) for sample in (False, True)]
SETTINGS += [
    ("cut", "tree", 3, True),
    ("cut", "chain", 1, False),
    ("normed", "tree", 3, False),
    ("normed", "chain", 3, True),
]


@pytest.mark.parametrize(("option", "shape", "rows", "sample"), SETTINGS)
def test_drafts_are_those_of_the_reference_without_a_cache(target, trained, option, shape, rows, sample):
    proposer = Checked(trained[option], SHAPES[shape])
    ids, mask = batch(PROMPTS[:rows])
    options = {"max_new_tokens": 14, "do_sample": sample, "eos_token_id": 6}
    out = speculative_generate(target, proposer, ids, mask, draft_length=3, seed=3, **options)
    assert proposer.checked > 2 * rows
    assert 0 < out.counts.num_accepted_tokens < out.counts.num_draft_tokens
    if not sample:
        plain = autoregressive_generate(target, ids, mask, **options)
        assert out.sequences.tolist() == plain.sequences.tolist()


def test_rounds_that_draft_nothing_are_made_up_for(target, trained):
    """Slots of many rounds, more than fit in one block, are fed when something is drafted again."""

    class ThrottledLog(Checked):
        def propose(self, contexts, draft_lengths):
            now = len(contexts[0]) % 7 == 0
            return super().propose(contexts, [k if now else 0 for k in draft_lengths])

    proposer = ThrottledLog(trained["plain"])
    ids, mask = batch(PROMPTS)
    out = speculative_generate(target, proposer, ids, mask, draft_length=2, max_new_tokens=30)
    assert proposer.checked > 6
    assert out.sequences.tolist() == autoregressive_generate(target, ids, mask, max_new_tokens=30).sequences.tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_forwards_change_nothing(target, trained, shape, traced):
    ids, mask = batch(PROMPTS)
    first = int(autoregressive_generate(target, ids, mask, max_new_tokens=1).sequences[1, -1])
    options = {"draft_length": 2, "max_new_tokens": 10, "eos_token_id": [6, first]}  # one row ends before all drafts
    plain = speculative_generate(target, EagleProposer(trained["plain"], SHAPES[shape]), ids, mask, **options)
    out = speculative_generate(
        target, EagleProposer(trained["plain"], SHAPES[shape]), ids, mask, compiled=True, **options
    )
    assert out.sequences.tolist() == plain.sequences.tolist() and out.counts == plain.counts
    # Whole drafts, but for those that grow.
    assert ("ModelDraftForward" in {key[0] for _, key in traced}) == (shape != "dynamic")


def test_more_siblings_than_the_heads_know_tokens_are_refused(target):
    proposer = EagleProposer(EagleHeads.of_target(target, token_map=torch.tensor([1, 2])), TREE)
    with pytest.raises(InputError, match=r"^tree: expected at most 2 siblings"):
        speculative_generate(target, proposer, torch.tensor([[1, 2]]), draft_length=2, max_new_tokens=4)


def test_heads_of_another_target_are_refused(trained):
    with pytest.raises(InputError, match=r"^eagle: expected heads with the target's vocab_size"):
        other = tiny_llama(0, 40, layers=4)
        speculative_generate(other, EagleProposer(trained["plain"]), torch.tensor([[1, 2]]), max_new_tokens=4)
