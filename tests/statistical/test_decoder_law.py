"""The law of sampled output over long texts, and a planted mistake that is caught, as `draftsmith measure` tests them.

The statistic is that of `decode.measurement.distribution_test`. Seeds are fixed; a right decoder fails one setting with
probability 1e-4 over the choice of seed. LAW_TOKENS=100000 runs as many tokens a setting. For every drafter and each
warping `test_enumeration.py` has the law of short texts, exactly.
"""

import os

import pytest
import torch
from conftest import perturbed, tiny_llama
from misreporting import Misreporting
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from draftsmith.decode import DraftModelProposer, PromptLookupProposer, Tree
from draftsmith.decode.measurement.distribution_test import distribution_test, sample_texts
from draftsmith.decode.sampling import Sampler

VOCAB = 13
NEW = 40
TOKENS = int(os.environ.get("LAW_TOKENS", 6_000))


@pytest.fixture(scope="module")
def models():
    # Peaked enough for lookup to be right now and then, flat enough for every token to occur.
    target = tiny_llama(3, VOCAB, layers=1, scale=18.0)
    return target, perturbed(target, 0.2)


def sampled(target, proposer, tokens):
    """Decode as many rows at once as are needed, and test the law of what comes out."""
    prompts = list(torch.randint(VOCAB, (-(-tokens // NEW), 4), generator=torch.Generator().manual_seed(5)))
    rows, options = min(500, len(prompts)), {"max_new_tokens": NEW, "top_k": 0, "temperature": 0.7, "top_p": 0.9}
    texts, counts = sample_texts(target, proposer, prompts, tokens, draft_length=2, batch_size=rows, **options)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)])
    sampler = Sampler(processors, do_sample=True)
    q = proposer.distributions_after(target, sampler)
    return distribution_test(target, texts, sampler, q, batch_size=128), counts


PROPOSERS = {
    "draft": DraftModelProposer,
    "lookup": lambda draft: PromptLookupProposer(),
    "tree": lambda draft: DraftModelProposer(draft, tree=Tree.from_choices([(0,), (1,), (0, 0), (0, 1)])),
}


@pytest.mark.parametrize("name", PROPOSERS)
def test_sampled_texts_have_the_targets_law(models, name):
    result, counts = sampled(models[0], PROPOSERS[name](models[1]), TOKENS)
    assert result.num_tokens >= TOKENS
    assert 0.2 < counts.conditional_acceptance()[0] < 0.9, counts  # drafts fail and stand
    assert counts.num_accepted_tokens_per_pos[1] > TOKENS / 200, counts
    assert result.p_value > 1e-4, result


def flattened(proposer, context, draft):
    """q as if its temperature were three times as high."""
    flat = draft.probabilities.pow(1 / 3)
    return {"probabilities": flat / flat.sum(-1, keepdim=True)}


def test_the_test_has_power(models):
    """p is below 4e-12 with so many tokens, over seeds."""
    result, _ = sampled(models[0], Misreporting(models[1], flattened), 12_000)
    assert result.p_value < 1e-8, result
