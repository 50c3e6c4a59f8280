"""The law of text where drafts end by their survival, exactly (`enumeration`): alone and in company."""

from collections import defaultdict

import pytest
import torch
from enumeration import enumerated, target_law
from specimens import DFLASH2, RECURRENT, block, eagle, medusa, proposer
from statistical.test_enumeration import (
    CUT,
    PROMPTS,
    ROUNDING,
    SETTINGS,
    compute_in_double,
    difference,
    llama,  # noqa: F401
)
from transformers import LogitsProcessorList

from draftsmith.decode import FixedLength, InputError, Tree, replay_acceptance
from draftsmith.decode.proposers.survival import Survival
from draftsmith.medusa import BlockProposer, EagleProposer, MedusaProposer


def confident(target, own=False):
    """A block drafter that is sure after token 2, and less after others; or, by mistake, of its `own` tokens 2."""
    drafter = BlockProposer(block(target, enable_confidence_head=True))

    def confidence(hidden_BSH, ends_B2, tokens_BK):
        seen_BK = tokens_BK if own else torch.cat([ends_B2[:, 1:], tokens_BK[:, :-1]], 1)
        return torch.where(seen_BK == 2, 0.6, 0.05).double()

    drafter.draft_model.confidence = confidence
    return drafter


def seeded(make, target):
    """Return heads that begin at random."""
    torch.manual_seed(4)
    return make(target)


def written(target, drafter, draft_length, setting=CUT, **options):
    """Return the difference of the law of a text from the target's, and the lengths of its drafts."""
    arguments, processors, length = SETTINGS[setting]
    (law,) = enumerated(target, drafter, PROMPTS[:1], length, draft_length=draft_length, **arguments, **options)
    sizes = {size for _, rounds in law.ends() for size, *_ in rounds}
    eos = arguments.get("eos_token_id")
    wanted = target_law(target, PROMPTS[0], length, LogitsProcessorList(processors), eos)
    return difference(law.texts(), wanted), sizes


DRAFTERS = {
    "draft model": (lambda target: proposer("draft", "chain", target), 0.7),
    "heads": (lambda target: MedusaProposer(medusa(target, hydra=True), Tree.chain(2)), 0.3),
    "eagle": (lambda target: EagleProposer(seeded(eagle, target)), 0.5),
    "mtp": (lambda target: proposer("mtp", "one layer", target), 0.985),
    "block": (lambda target: BlockProposer(block(target)), 0.5),
    "block, confidence head": (lambda target: BlockProposer(block(target, enable_confidence_head=True)), 0.26),
    "DFlash 2, confidence head": (
        lambda target: BlockProposer(block(target, enable_confidence_head=True, **DFLASH2)),
        0.2286,
    ),
    "Domino, confidence head": (
        lambda target: BlockProposer(block(target, enable_confidence_head=True, **RECURRENT)),
        0.26,
    ),
    "parallel": (lambda target: proposer("parallel_draft", "chain", target), 0.3),
}


@pytest.mark.parametrize("company", [(), PROMPTS[1:2]], ids=["alone", "in company"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_cut_at_a_survival_leave_the_law(llama, monkeypatch, drafter, company):  # noqa: F811
    compute_in_double(monkeypatch, llama)
    make, level = DRAFTERS[drafter]
    error, sizes = written(llama, make(llama), FixedLength(2, level), company=company)
    assert error < ROUNDING
    assert len(sizes - {0}) + len(company) > 1, sizes


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name not in ("heads", "parallel")])
def test_replay_expects_the_rounds_of_each_text(llama, monkeypatch, drafter):  # noqa: F811
    compute_in_double(monkeypatch, llama)
    make, level = DRAFTERS[drafter]
    drafter = make(llama)
    (law,) = enumerated(llama, drafter, PROMPTS[:1], 4, draft_length=FixedLength(2, level), top_k=3)
    masses, rounds = law.texts(), defaultdict(float)
    for (text, way), mass in law.ends().items():
        rounds[text] += mass * len(way) / masses[text]
    texts = [torch.tensor([*PROMPTS[0], *text]) for text in masses]
    prompts = [len(PROMPTS[0])] * len(texts)
    replays = [
        replay_acceptance(
            llama, drafter, texts, prompts, [2], top_k=3, max_new_tokens=4, allow_biased=True, survival=least
        )
        for least in (level, 0.0)
    ]
    expected, uncut = ([text.counts[2].num_drafts for text in replay.texts] for replay in replays)
    assert expected == pytest.approx([rounds[text] for text in masses], abs=1e-6)
    assert any(one > other + 1e-3 for one, other in zip(expected, uncut, strict=True))


def test_a_cut_that_looks_at_the_guess_itself_is_caught(llama, monkeypatch):  # noqa: F811
    compute_in_double(monkeypatch, llama)
    right, wrong = (written(llama, confident(llama, own), FixedLength(2, 0.3)) for own in (False, True))
    assert right[0] < ROUNDING and wrong[0] > 1e-4, (right, wrong)


def test_a_budget_that_weighs_later_survivals_is_caught(llama, monkeypatch):  # noqa: F811
    """It verifies the slots that promise most tokens a second: whether the first is one, its own token helps to say."""
    compute_in_double(monkeypatch, llama)

    def best(survival, confidence_BK, draft_lengths):
        (survivals,) = confidence_BK.cumprod(1).tolist()
        seconds = (1.0, 1.8, 1.9)
        rates = [(1 + sum(survivals[:k])) / seconds[k] for k in range(1 + len(survivals))]
        return [min(draft_lengths[0], rates.index(max(rates)))]

    monkeypatch.setattr(Survival, "cut", best)
    error, sizes = written(llama, confident(llama), FixedLength(2, 0.5))
    assert sizes == {0, 2} and error > 1e-4, (error, sizes)


def test_a_survival_that_nothing_gives_is_refused(llama):  # noqa: F811
    for drafter in (BlockProposer(block(llama), Tree.chain(2)), proposer("prompt_lookup", "chain", llama)):
        expected = "expected chains of a drafter that knows its confidence, under the exact rule"
        with pytest.raises(InputError, match=rf"^survival: {expected}, found {type(drafter).__name__}$"):
            written(llama, drafter, FixedLength(2, 0.5))
    with pytest.raises(InputError, match=r"^survival: expected at least 0 and at most 1, found 1.5$"):
        FixedLength(2, 1.5)
