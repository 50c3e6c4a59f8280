"""The law of sampled output over long texts, for each drafter and each warping, and planted mistakes that are caught.

The statistic is that of `draftsmith.decode.lossless`. Seeds are fixed; a right decoder fails one setting with
probability 1e-4 over the choice of seed. `python -m draftsmith.scripts.check_lossless` runs the same test on any
pair of models.
"""

import os
from dataclasses import replace

import pytest
import torch
from conftest import perturbed, tiny_llama
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.decode import (
    DraftModelProposer,
    DynamicTree,
    PromptLookupProposer,
    Tree,
    acceptance,
    speculative,
    speculative_generate,
)
from draftsmith.decode.lossless import law_test, model_drafter
from draftsmith.decode.sampling import Law

FALSE_ALARM = 1e-4
NEW = 100
# Tokens a setting: LAW_TOKENS=100000 takes half an hour. Processors that look back cost a call for each position.
TOKENS = {"T=0.7 top-p": 10_000, "T=1": 10_000, "penalties": 2_500}
if "LAW_TOKENS" in os.environ:
    TOKENS = dict.fromkeys(TOKENS, int(os.environ["LAW_TOKENS"]))
VOCAB = 13


class FrequencyPenalty(LogitsProcessor):
    """logits − penalty · count, as serving engines have it: it looks at every token before its position."""

    def __init__(self, penalty: float):
        self.penalty = penalty

    def __call__(self, input_ids, scores):
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype))
        return scores - self.penalty * counts


# name → (arguments of generate, the law they ask for)
LAWS = {
    "T=0.7 top-p": (
        {"temperature": 0.7, "top_p": 0.9},
        [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)],
    ),
    "T=1": ({}, []),
    "penalties": (
        {
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 3,
            "logits_processor": LogitsProcessorList([FrequencyPenalty(0.02)]),
        },
        [RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(3), FrequencyPenalty(0.02)],
    ),
}


@pytest.fixture(scope="module")
def models():
    target = tiny_llama(3, VOCAB, layers=1, scale=10.0)
    return target, perturbed(target, 0.3)


def proposers(draft):
    return {
        "draft": DraftModelProposer(draft),
        "lookup": PromptLookupProposer(),
        "tree": DraftModelProposer(draft, tree=Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])),
        "dynamic tree": DraftModelProposer(draft, tree=DynamicTree(2, 6)),
    }


def lookup_drafter(vocab_size: int):
    """What prompt lookup says of each position: a one-hot law on what followed the last match."""
    lookup = PromptLookupProposer()

    def drafter(text, prompt_length):
        q = torch.zeros(len(text) - prompt_length, vocab_size)
        for i in range(len(q)):
            (draft,) = lookup.propose([text[: prompt_length + i]], [1])
            q[i, draft.tokens] = 1.0
        return q

    return drafter


def sampled(models, proposer, law_name, drafter="model", tokens=None):
    """Decode, and test the law of what comes out."""
    target, draft = models
    arguments, processors = LAWS[law_name]
    generator = torch.Generator().manual_seed(5)
    tokens = tokens or TOKENS[law_name]
    prompts = torch.randint(VOCAB, (tokens // NEW, 4), generator=generator)
    out = speculative_generate(
        target, proposer, prompts, draft_length=3, max_new_tokens=NEW, do_sample=True, top_k=0, seed=0, **arguments
    )
    law = Law(LogitsProcessorList(processors), do_sample=True)
    against = model_drafter(draft, law, VOCAB) if drafter == "model" else lookup_drafter(VOCAB)
    texts = ((text, 4) for text in out.sequences)
    return law_test(target, texts, law, against), out.counts


@pytest.mark.parametrize("law_name", LAWS)
@pytest.mark.parametrize("name", ["draft", "lookup", "tree", "dynamic tree"])
def test_sampled_texts_have_the_targets_law(models, name, law_name):
    drafter = "lookup" if name == "lookup" else "model"
    result, counts = sampled(models, proposers(models[1])[name], law_name, drafter)
    assert result.num_tokens == TOKENS[law_name]
    assert 0.05 < counts.num_accepted_tokens / counts.num_drafts < 2, counts  # drafts fail and stand
    assert result.p_value > FALSE_ALARM, result


class Misreporting(DraftModelProposer):
    """Draws from q and says that it drew from another law."""

    def __init__(self, draft, mistake, **options):
        super().__init__(draft, **options)
        self.mistake = mistake

    def propose(self, contexts, draft_lengths):
        drafts = super().propose(contexts, draft_lengths)
        return [d if d.probabilities is None else replace(d, **self.mistake(d)) for d in drafts]


def flattened(draft):
    """q as if its temperature were three times as high."""
    flat = draft.probabilities.pow(1 / 3)
    return {"probabilities": flat / flat.sum(-1, keepdim=True)}


def argmax_scored_with_q(draft):
    """The most likely token is proposed, and accepted as if it had been drawn (transformers #47932)."""
    return {"tokens": draft.probabilities.argmax(-1)}


PLANTS = {
    "q at another temperature": ("T=0.7 top-p", lambda draft: Misreporting(draft, flattened), {}),
    "argmax drafts scored with q": ("T=1", lambda draft: Misreporting(draft, argmax_scored_with_q), {}),
    "residual by softmax": (
        "T=1",
        DraftModelProposer,
        {(acceptance, "residual"): lambda p, q, x: (p - q).softmax(-1)},
    ),
    "no residual": ("T=1", DraftModelProposer, {(acceptance, "residual"): lambda p, q, x: p}),
    "siblings tried against p": (
        "T=1",
        lambda draft: DraftModelProposer(draft, tree=Tree.from_choices([(0,), (1,), (2,)])),
        {(acceptance, "residual"): lambda p, q, x: p},
    ),
    "processors that do not see the drafted tokens": (
        "penalties",
        DraftModelProposer,
        {(speculative, "_contexts"): lambda row, draft: [row.context] * (len(draft.tokens) + 1)},
    ),
    "a bonus by argmax": (
        "T=1",
        DraftModelProposer,
        {(acceptance, "draw"): lambda p, generator: p.argmax(-1, keepdim=True)},
    ),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_the_test_has_power(models, monkeypatch, plant):
    law_name, proposer, patches = PLANTS[plant]
    for (module, name), mistake in patches.items():
        monkeypatch.setattr(module, name, mistake)
    result, _ = sampled(models, proposer(models[1]), law_name, tokens=5000 if law_name == "penalties" else 10_000)
    assert result.p_value < 1e-8, result
