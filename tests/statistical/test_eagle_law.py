"""The law of text that was sampled with EAGLE-3 heads: chains, trees and trees that grow.

The statistic is that of `decode.measurement.distribution_test`, by chi-square. Seeds are fixed; a right decoder fails
one setting with probability 1e-4 over the choice of seed. LAW_TOKENS=100000 runs as many tokens a setting.
"""

from dataclasses import replace

import pytest
import torch
from conftest import tiny_llama
from statistical.test_decoder_law import FALSE_ALARM, NEW, TOKENS, VOCAB, sampled
from trained_eagle import train_eagle

from draftsmith.decode import DynamicTree, Tree, autoregressive_generate
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.proposer import EagleProposer

SHAPES = {
    "chain": None,
    "tree": Tree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]),
    "dynamic": DynamicTree(2, 5),
}
KINDS = {
    "plain": {},
    "cut": {"token_map": torch.tensor([1, 3, 4, 6, 8, 10, 12])},
    "windowed": {"sliding_window": 4},
}
SETTINGS = [
    ("plain", "chain", "T=0.7 top-p"),
    ("cut", "chain", "T=1"),
    ("plain", "tree", "T=1"),
    ("cut", "tree", "T=0.7 top-p"),
    ("plain", "dynamic", "T=1"),
    ("windowed", "chain", "T=1"),
    ("windowed", "dynamic", "T=0.7 top-p"),
]


@pytest.fixture(scope="module")
def target():
    return tiny_llama(3, VOCAB, layers=3, scale=18.0)


@pytest.fixture(scope="module")
def trained(target):
    """Heads that learnt from the target's own samples."""
    prompts = torch.randint(VOCAB, (20, 4), generator=torch.Generator().manual_seed(7))
    texts = list(autoregressive_generate(target, prompts, do_sample=True, top_k=0, max_new_tokens=NEW).sequences)
    made = {}
    for name, options in KINDS.items():
        torch.manual_seed(0)
        made[name] = train_eagle(target, EagleHeads.of_target(target, **options), texts, steps=40, rate=1e-2, depth=1)
    return made


@pytest.mark.parametrize(("kind", "shape", "law_name"), SETTINGS)
def test_sampled_texts_have_the_targets_law(target, trained, kind, shape, law_name):
    result, counts = sampled(target, EagleProposer(trained[kind], SHAPES[shape]), law_name, TOKENS)
    assert result.num_tokens >= TOKENS
    assert 0.1 < counts.conditional_acceptance()[0] < 0.95, counts  # drafts fail and stand
    assert counts.num_accepted_tokens_per_pos[1] > TOKENS / 200, counts
    assert result.p_value > FALSE_ALARM, result


class Flattened(EagleProposer):
    """Draws from q, and says that it drew from a flatter law."""

    def propose(self, contexts, draft_lengths):
        drafts = list(super().propose(contexts, draft_lengths))
        for i, draft in enumerate(drafts):
            if draft.probabilities is not None:
                flat = draft.probabilities.pow(1 / 6)
                drafts[i] = replace(draft, probabilities=flat / flat.sum(-1, keepdim=True))
        return drafts


def test_the_test_has_power(target, trained):
    """What is told of q decides: with half of the tokens a wrong one is found."""
    result, _ = sampled(target, Flattened(trained["plain"]), "T=1", TOKENS // 2)
    assert result.p_value < FALSE_ALARM / 100, result
