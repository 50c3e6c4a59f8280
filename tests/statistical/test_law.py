"""The law of sampled output, by chi-square against the target's own distribution.

Seeds are fixed, so a pass or fail repeats. Each test rejects a right implementation with probability 1e-4 over the
choice of seed; the size of each test is chosen so that the planted mistakes of `test_the_test_has_power` are caught.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import tiny_llama
from scipy.stats import chisquare
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftsmith.decode import DraftModelProposer, speculative_generate
from draftsmith.decode.sampling import Sampler

FALSE_ALARM = 1e-4
VOCAB = 11
SAMPLES = 1500
PROMPT = torch.tensor([[3, 1, 4]])


@pytest.fixture(scope="module")
def small():
    return tiny_llama(2, VOCAB, layers=1, scale=8.0)


def law_of(temperature: float, top_k: int, top_p: float) -> Sampler:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    return Sampler(warpers, do_sample=True)


def exact_law(model, sampler: Sampler, length: int) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of PROMPT of that length, by enumeration."""
    distributions: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, mass in distributions.items():
            ids = torch.cat([PROMPT, torch.tensor([text], dtype=torch.long)], dim=1)
            p = sampler.probabilities(model(ids).logits[0, -1:].double(), [ids[0]])[0]
            longer |= {(*text, v): mass * float(p[v]) for v in range(VOCAB) if p[v] > 0}
        distributions = longer
    return distributions


def p_value(model, proposer, law_args, length: int = 3, samples: int = SAMPLES, draft_length: int = 2) -> float:
    temperature, top_k, top_p = law_args
    batch = PROMPT.repeat(samples, 1)
    out = speculative_generate(
        model, proposer, batch, draft_length=draft_length, max_new_tokens=length, do_sample=True, seed=0,
        temperature=temperature, top_k=top_k, top_p=top_p,
    )  # fmt: skip
    seen = Counter(tuple(row) for row in out.sequences[:, PROMPT.shape[1] :].tolist())
    expected = exact_law(model, law_of(*law_args), length)
    assert set(seen) <= set(expected), "a text outside the law's support was emitted"
    # Texts too rare for the chi-square approximation are pooled.
    common = [text for text, mass in expected.items() if mass * samples >= 8]
    f_exp = [expected[text] * samples for text in common]
    f_obs = [float(seen[text]) for text in common]
    f_exp.append(samples - sum(f_exp))
    f_obs.append(samples - sum(f_obs))
    if f_exp[-1] < 1e-6 * samples:
        f_exp.pop(), f_obs.pop()
    scale = sum(f_obs) / sum(f_exp)
    return float(chisquare(f_obs, [e * scale for e in f_exp]).pvalue)


@pytest.mark.parametrize("law_args", [(1.0, 0, 1.0), (1.3, 4, 1.0), (0.9, 6, 0.9)])
def test_emitted_texts_have_the_targets_law(small, law_args):
    draft = perturbed_draft(small)
    p = p_value(small, DraftModelProposer(draft), law_args)
    assert p > FALSE_ALARM, (
        f"p = {p:.2g} (a right decoder falls below {FALSE_ALARM} once in {1 / FALSE_ALARM:.0f} seeds)"
    )


def perturbed_draft(model):
    draft = tiny_llama(2, VOCAB, layers=1, scale=8.0)
    torch.manual_seed(9)
    with torch.no_grad():
        draft.lm_head.weight.add_(torch.randn_like(draft.lm_head.weight) * 0.25)
    return draft


class RawQ(DraftModelProposer):
    """Planted mistake 1: says that it drew from other probabilities than it did."""

    def propose(self, contexts, draft_lengths):
        drafts = super().propose(contexts, draft_lengths)
        return [
            d if d.probabilities is None else replace(d, probabilities=torch.full_like(d.probabilities, 1 / VOCAB))
            for d in drafts
        ]


def test_the_test_has_power(small):
    assert p_value(small, RawQ(perturbed_draft(small)), (1.0, 0, 1.0)) < 1e-10
