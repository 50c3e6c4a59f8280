"""The law of text that was sampled with Medusa and Hydra heads, and planted mistakes that are caught.

The statistic is that of `decode.measurement.distribution_test`, by chi-square. Seeds are fixed; a right decoder fails
one setting with probability 1e-4 over the choice of seed. LAW_TOKENS=100000 runs as many tokens a setting.
"""

import copy
from dataclasses import replace

import pytest
import torch
from conftest import tiny_llama
from statistical.test_decoder_law import FALSE_ALARM, NEW, TOKENS, VOCAB, sampled
from trained_heads import own_texts, train_heads

from draftsmith.decode import Tree
from draftsmith.decode.proposers import draft_tree
from draftsmith.decode.rules import verification
from draftsmith.medusa import MedusaHeads, MedusaProposer

TREE = Tree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)])
KINDS = {"medusa": {}, "hydra": {"hydra": True}, "truncated": {"token_map": torch.tensor([12, 1, 3, 4, 6, 8, 10])}}


@pytest.fixture(scope="module")
def target():
    # Peaked enough for heads to be right now and then, flat enough for every token to occur.
    return tiny_llama(3, VOCAB, layers=1, scale=18.0)


@pytest.fixture(scope="module")
def trained(target):
    """Heads that learnt from the target's own samples."""
    prompts = list(torch.randint(VOCAB, (20, 4), generator=torch.Generator().manual_seed(7)))
    texts = own_texts(target, prompts, do_sample=True, top_k=0, max_new_tokens=NEW)
    return {
        name: train_heads(target, MedusaHeads.of_target(target, 2, **options), texts) for name, options in KINDS.items()
    }


# Every kind of heads, and both shapes; penalties are in `test_enumeration.py`, exactly.
SETTINGS = [
    ("medusa", "chain", "T=0.7 top-p"),
    ("medusa", "tree", "T=1"),
    ("hydra", "chain", "T=1"),
    ("hydra", "tree", "T=0.7 top-p"),
    ("truncated", "tree", "T=0.7 top-p"),
]


@pytest.mark.parametrize(("kind", "shape", "law_name"), SETTINGS)
def test_sampled_texts_have_the_targets_law(target, trained, kind, shape, law_name):
    drafter = MedusaProposer(trained[kind], TREE if shape == "tree" else None)
    result, counts = sampled(target, drafter, law_name, TOKENS)
    assert result.num_tokens >= TOKENS
    assert 0.1 < counts.conditional_acceptance()[0] < 0.9, counts  # drafts fail and stand
    assert counts.num_accepted_tokens_per_pos[1] > TOKENS / 200, counts
    assert result.p_value > FALSE_ALARM, result


class Misreporting(MedusaProposer):
    """Draws from q and says that it drew from another law, or says what it did not draw."""

    def __init__(self, heads, mistake, tree=None):
        super().__init__(heads, tree)
        self.mistake = mistake

    def propose(self, contexts, draft_lengths):
        drafts = [draft.dense(self._task.vocab_size) for draft in super().propose(contexts, draft_lengths)]
        return [d if d.probabilities is None else replace(d, **self.mistake(self, i, d)) for i, d in enumerate(drafts)]


def flattened(drafter, row, draft):
    """q as if its temperature were six times as high."""
    flat = draft.probabilities.pow(1 / 6)
    return {"probabilities": flat / flat.sum(-1, keepdim=True)}


def argmax_scored_with_q(drafter, row, draft):
    """Each head's most likely token is proposed, and accepted as if it had been drawn: as Medusa's trees are."""
    return {"tokens": draft.probabilities.argmax(-1)}


def best_draws(q_BFM, u_BPM, count):
    """Siblings are the most likely tokens, and are scored as if they had been drawn one behind the other."""
    return q_BFM.expand(u_BPM.shape).topk(count).indices


def against_p(p_M, q_M, places, r):
    """Later siblings are tried as the first one is, and nothing is taken off p."""
    left = 1.0
    for i, place in enumerate(places):
        if left > 0 and r[i] * q_M[place] / left < p_M[place]:
            return i, p_M
        left -= q_M[place]
    return None, p_M


PLANTS = {
    "q at another temperature": ("T=1", lambda heads: Misreporting(heads, flattened), {}),
    "argmax drafts scored with q": ("T=1", lambda heads: Misreporting(heads, argmax_scored_with_q), {}),
    "the most likely siblings scored with q": (
        "T=1",
        lambda heads: MedusaProposer(heads, TREE),
        {(draft_tree, "draw_siblings"): best_draws},
    ),
    "siblings tried against p": (
        "T=1",
        lambda heads: MedusaProposer(heads, TREE),
        {(verification, "accept_siblings"): against_p},
    ),
}


EASY = ("q at another temperature",)  # p < 1e-11 with 3,000 tokens


@pytest.mark.parametrize("plant", PLANTS)
def test_the_test_has_power(target, trained, monkeypatch, plant):
    """No plant is given more tokens than a right decoder, and two half of them. Heads that are too sure draft."""
    law_name, drafter, patches = PLANTS[plant]
    for (module, name), mistake in patches.items():
        monkeypatch.setattr(module, name, mistake)
    heads = copy.deepcopy(trained["medusa"])
    heads.config.logit_scale *= 3
    result, _ = sampled(target, drafter(heads), law_name, 3_000 if plant in EASY else 6_000)
    assert result.p_value < FALSE_ALARM / 100, result
