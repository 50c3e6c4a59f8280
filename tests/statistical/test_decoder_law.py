"""The law of sampled output over long texts, for each drafter and each warping, and planted mistakes that are caught.

The statistic is that of `decode.measurement.distribution_test`. Seeds are fixed; a right decoder fails one setting with
probability 1e-4 over the choice of seed. LAW_TOKENS=100000 runs as many tokens a setting, in half an hour;
`draftsmith measure` runs the same test on any pair of models.
"""

import os

import pytest
import torch
from conftest import perturbed, tiny_llama
from misreporting import Misreporting, argmax_scored_with_q
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.decode import DraftModelProposer, DynamicTree, PromptLookupProposer, Tree, speculative
from draftsmith.decode.measurement.distribution_test import distribution_test, sample_texts
from draftsmith.decode.rules import acceptance
from draftsmith.decode.sampling import Sampler, draw_rows

FALSE_ALARM = 1e-4
VOCAB = 13
NEW = 40
TOKENS = int(os.environ.get("LAW_TOKENS", 6_000))


class FrequencyPenalty(LogitsProcessor):
    """logits − penalty · count, as serving engines have it: it looks at every token before its position."""

    def __init__(self, penalty: float):
        self.penalty = penalty

    def __call__(self, input_ids, scores):
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype))
        return scores - self.penalty * counts


# name → (arguments of generate, the law they ask for)
LAWS = {
    "T=0.7 top-p": ({"temperature": 0.7, "top_p": 0.9}, [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)]),
    "T=1": ({}, []),
    "penalties": (
        {
            "repetition_penalty": 1.1,
            "no_repeat_ngram_size": 5,
            "logits_processor": LogitsProcessorList([FrequencyPenalty(0.05)]),
        },
        [RepetitionPenaltyLogitsProcessor(1.1), NoRepeatNGramLogitsProcessor(5), FrequencyPenalty(0.05)],
    ),
}


@pytest.fixture(scope="module")
def models():
    # Peaked enough for lookup to be right now and then, flat enough for every token to occur.
    target = tiny_llama(3, VOCAB, layers=1, scale=18.0)
    return target, perturbed(target, 0.2)


def proposers(draft):
    return {
        "draft": DraftModelProposer(draft),
        "lookup": PromptLookupProposer(),
        "tree": DraftModelProposer(draft, tree=Tree.from_choices([(0,), (1,), (0, 0), (0, 1)])),
        "dynamic tree": DraftModelProposer(draft, tree=DynamicTree(2, 4)),
    }


def sampled(target, proposer, law_name, tokens):
    """Decode as many rows at once as are needed, and test the law of what comes out."""
    arguments, processors = LAWS[law_name]
    prompts = list(torch.randint(VOCAB, (-(-tokens // NEW), 4), generator=torch.Generator().manual_seed(5)))
    rows = min(500, len(prompts))
    texts, counts = sample_texts(
        target, proposer, prompts, tokens, draft_length=2, batch_size=rows, max_new_tokens=NEW, top_k=0, **arguments
    )
    sampler = Sampler(LogitsProcessorList(processors), do_sample=True)
    q = proposer.distributions_after(target, sampler)
    return distribution_test(target, texts, sampler, q, batch_size=128), counts


# Every law with chains; the shape of a draft and where its tokens come from are another matter. What looks at the text
# takes ten times the time, and `test_enumeration.py` has it for every drafter and shape.
@pytest.mark.parametrize(
    ("name", "law_name"),
    [
        *(("draft", law_name) for law_name in LAWS),
        ("lookup", "T=0.7 top-p"),
        ("tree", "T=1"),
        ("dynamic tree", "T=0.7 top-p"),
    ],
)
def test_sampled_texts_have_the_targets_law(models, name, law_name):
    tokens = TOKENS // 2 if law_name == "penalties" else TOKENS
    result, counts = sampled(models[0], proposers(models[1])[name], law_name, tokens)
    assert result.num_tokens >= tokens
    assert 0.2 < counts.conditional_acceptance()[0] < 0.9, counts  # drafts fail and stand
    assert counts.num_accepted_tokens_per_pos[1] > tokens / 200, counts
    assert result.p_value > FALSE_ALARM, result


def flattened(proposer, context, draft):
    """q as if its temperature were three times as high."""
    flat = draft.probabilities.pow(1 / 3)
    return {"probabilities": flat / flat.sum(-1, keepdim=True)}


PLANTS = {
    "q at another temperature": ("T=0.7 top-p", lambda draft: Misreporting(draft, flattened), {}),
    "argmax drafts scored with q": ("T=1", lambda draft: Misreporting(draft, argmax_scored_with_q), {}),
    "residual by softmax": (
        "T=1",
        DraftModelProposer,
        {(acceptance, "residual_rows"): lambda p, q: (p - q).softmax(-1)},
    ),
    "no residual after lookup": (
        "T=0.7 top-p",
        lambda draft: PromptLookupProposer(),
        {(acceptance, "residual_rows"): lambda p, q: p},
    ),
    "processors that do not see the drafted tokens": (
        "penalties",
        DraftModelProposer,
        {(speculative, "Contexts"): lambda text, draft: [text] * (len(draft.tokens) + 1)},
    ),
    "a bonus by argmax": ("T=1", DraftModelProposer, {(acceptance, "draw_rows"): lambda p, u: p.argmax(-1)}),
    "one random number for all corrections": (
        "T=1",
        DraftModelProposer,
        {(acceptance, "draw_rows"): lambda p, u: draw_rows(p, torch.full_like(u, 0.25))},
    ),
}


HARDEST = "q at another temperature"  # p is below 4e-12 with 12,000 tokens, over seeds, and with 6,000 up to 1e-2


@pytest.mark.parametrize("plant", PLANTS)
def test_the_test_has_power(models, monkeypatch, plant):
    """But for the hardest, mistakes are given half the tokens of a right decoder: p is then below 1e-11.

    Those with siblings are in `test_enumeration.py`.
    """
    law_name, proposer, patches = PLANTS[plant]
    for (module, name), mistake in patches.items():
        monkeypatch.setattr(module, name, mistake)
    target, draft = models
    tokens = {"penalties": 2_000}.get(law_name, 12_000 if plant == HARDEST else 3_000)
    result, _ = sampled(target, proposer(draft), law_name, tokens)
    assert result.p_value < 1e-8, result
