"""The law of text that was sampled with a parallel draft, and planted mistakes that are caught.

The statistic is that of `decode.measurement.distribution_test`, by chi-square. Seeds are fixed; a right decoder fails
one setting with probability 1e-4 over the choice of seed. LAW_TOKENS=100000 runs as many tokens a setting.
"""

from dataclasses import replace

import pytest
import torch
from conftest import tiny_llama
from statistical.test_decoder_law import FALSE_ALARM, NEW, TOKENS, VOCAB, sampled
from statistical.test_medusa_law import best_draws
from trained_heads import own_texts
from trained_parallel import train_parallel

from draftsmith.decode import ParallelDraftProposer, Tree
from draftsmith.decode.proposers import draft_tree

MASK = VOCAB
"""Beyond the target's vocabulary."""
TREE = Tree.from_choices([(0,), (1,), (0, 0), (0, 1)])


@pytest.fixture(scope="module")
def models():
    """A target, and a parallel draft that learnt from its samples."""
    # Peaked enough for drafts to be right now and then, flat enough for every token to occur.
    target = tiny_llama(3, VOCAB, layers=1, scale=18.0)
    prompts = list(torch.randint(VOCAB, (30, 4), generator=torch.Generator().manual_seed(7)))
    texts = own_texts(target, prompts, do_sample=True, top_k=0, max_new_tokens=NEW)
    return target, train_parallel(tiny_llama(4, VOCAB + 1, layers=1), MASK, 2, texts, steps=60, rate=1e-2)


@pytest.mark.parametrize(
    ("shape", "law_name"), [("chain", "T=0.7 top-p"), ("chain", "T=1"), ("tree", "T=0.7 top-p"), ("tree", "T=1")]
)
def test_sampled_texts_have_the_targets_law(models, shape, law_name):
    proposer = ParallelDraftProposer(models[1], TREE if shape == "tree" else None)
    result, counts = sampled(models[0], proposer, law_name, TOKENS)
    assert result.num_tokens >= TOKENS
    assert 0.1 < counts.conditional_acceptance()[0] < 0.9, counts  # drafts fail and stand
    assert counts.num_accepted_tokens_per_pos[1] > TOKENS / 200, counts
    assert result.p_value > FALSE_ALARM, result


class OtherOffsets(ParallelDraftProposer):
    """Says of each token that it was drawn from the distribution of the other offset."""

    def propose(self, contexts, draft_lengths):
        drafts = [draft.dense(self.task.vocab_size) for draft in super().propose(contexts, draft_lengths)]
        return [d if d.probabilities is None else replace(d, probabilities=d.probabilities.flip(0)) for d in drafts]


PLANTS = {
    "q of another offset": (OtherOffsets, {}),
    "the most likely siblings scored with q": (
        lambda draft: ParallelDraftProposer(draft, TREE),
        {(draft_tree, "draw_siblings"): best_draws},
    ),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_the_test_has_power(models, monkeypatch, plant):
    """No plant is given more tokens than a right decoder."""
    proposer, patches = PLANTS[plant]
    for (module, name), mistake in patches.items():
        monkeypatch.setattr(module, name, mistake)
    result, _ = sampled(models[0], proposer(models[1]), "T=1", 6_000)
    assert result.p_value < FALSE_ALARM / 100, result
