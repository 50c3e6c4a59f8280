"""Logits and distributions of each round are those of fresh forwards of each path; mistakes in caches are seen."""

import pytest
import torch
from conftest import perturbed, tiny_llama
from families import tiny_model

from draftsmith.decode import DraftModelProposer, Tree, cache, speculative_generate

TREE = Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
DEEP = Tree.from_choices([(0,), (1,), (1, 0), (1, 0, 0)])


class Watched(DraftModelProposer):
    """Compares each round with forwards without a cache; keeps how many tokens were accepted in a round."""

    def __init__(self, target, draft, tree):
        super().__init__(draft, tree=tree)
        self.target, self.accepted = target, set()

    def propose(self, contexts, draft_lengths):
        self.drafts = super().propose(contexts, draft_lengths)
        self.contexts = [context.clone() for context in contexts]
        return self.drafts

    def commit(self, outcomes):
        super().commit(outcomes)
        size = self.target.config.vocab_size
        (context,), (d,), (outcome,) = self.contexts, [d.dense(size) for d in self.drafts], outcomes
        for node in range(-1, len(d.tree)):
            alone = torch.cat([context, d.tokens[d.tree.path(node)]])[None]
            assert torch.allclose(outcome.logits[node + 1], self.target(alone).logits[0, -1], atol=1e-4)
            if node < 0:
                continue
            q = self.draft_model(alone[:, :-1]).logits[0, -1].softmax(-1)
            if d.confidence is not None:
                assert torch.allclose(d.confidence[node], q.max(), atol=1e-5)
            if d.probabilities is not None:  # drawn without replacement: without the earlier siblings
                siblings = d.tree.children[d.tree.parents[node] + 1]
                q = q.index_fill(0, d.tokens[[n for n in siblings if n < node]], 0.0)
                assert torch.allclose(d.probabilities[node], q / q.sum(), atol=1e-4)
                assert d.probabilities[node, d.tokens[node]] > 0
        self.accepted.add(len(outcome.path))


def rounds(target, draft, tree, new=40, do_sample=True) -> set[int]:
    watched, prompt = Watched(target, draft, tree), torch.tensor([[3, 1, 4, 1, 5, 9]])
    options = {"draft_length": 3, "max_new_tokens": new, "do_sample": do_sample, "top_k": 0}
    speculative_generate(target, watched, prompt, **options)
    return watched.accepted


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_rounds_are_fresh_forwards(tree):
    """With some that dropped all of the draft, and some that kept all of it."""
    target = tiny_llama(0)
    assert {0, 3} <= rounds(target, perturbed(target, 0.2), tree)
    assert rounds(target, perturbed(target, 0.1), tree, 12, do_sample=False)


@pytest.mark.parametrize("window", [6, 2])
@pytest.mark.parametrize("tree", [None, TREE, DEEP], ids=["chain", "tree", "a deep branch"])
def test_windows_may_be_narrower_than_trees_are_deep(window, tree):
    target = tiny_model("mistral", sliding_window=window)
    assert rounds(target, target, tree, 15, do_sample=False)


feed = cache.CachedModel.feed


def on_host(starts) -> list[int]:
    return starts.host if isinstance(starts, cache.Slots) else list(starts)


def keeps_a_rejected_token(model, tokens, starts, *args, **kwargs):
    return feed(model, tokens, [start + (start > 10) for start in on_host(starts)], *args, **kwargs)


def counts_nodes(model, tokens, starts, keep=None, visible=None, depths=None, further=None):
    """A node's position is its number, and not its depth."""
    depths = None if depths is None else torch.arange(tokens.shape[1])
    return feed(model, tokens, starts, keep, visible, depths, further)


def forgets_the_last_token(self, outcomes):
    """After full acceptance it takes its last drafted token to be in its cache, where it never was fed."""
    commit(self, outcomes)
    for row, outcome in enumerate(outcomes):
        self.feeder.cached[row] += len(outcome.path) == len(self._fed[row])


commit = DraftModelProposer.commit
MISTAKES = {
    "the target keeps a rejected token": (None, cache.CachedModel, "feed", keeps_a_rejected_token),
    "positions count nodes": (TREE, cache.CachedModel, "feed", counts_nodes),
    "the last token is not fed after full acceptance": (None, DraftModelProposer, "commit", forgets_the_last_token),
    "nodes see their cousins": (
        TREE, Tree, "visible", property(lambda tree: torch.ones(len(tree) + 1, len(tree) + 1, dtype=torch.bool).tril()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(monkeypatch, mistake):
    tree, owner, name, change = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, change)
    target = tiny_llama(0)
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
        rounds(target, perturbed(target, 0.2), tree)
