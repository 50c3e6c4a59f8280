"""Drafts that end by their survival: the rule by hand, and replay against the decoder."""

import pytest
import torch
from specimens import LENGTH, block, case_id, medusa, proposer, shapes

from draftsmith.decode import (
    FixedLength,
    InputError,
    Tree,
    autoregressive_generate,
    replay_acceptance,
    speculative_generate,
)
from draftsmith.decode.proposers.base import DraftTask
from draftsmith.decode.proposers.survival import Survival
from draftsmith.decode.replay.texts import WrittenText
from draftsmith.decode.sampling import Sampler
from draftsmith.medusa import BlockProposer, MedusaProposer


@pytest.mark.parametrize("level", [0.0, 0.2, 0.5, 1.0])
def test_a_slot_is_verified_while_the_mean_survival_is_enough(level):
    """The slow reference: means of products, of all rows that have room there."""
    confidence_BK = torch.rand(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.double).sqrt()
    for rows in confidence_BK.split(4):
        room = [6, 2, 4, 6]
        reach_BK = rows.cumprod(1).where(torch.arange(6) < torch.tensor(room)[:, None], 0.0)
        kept = (reach_BK.mean(0) >= level).double().cumprod(0).sum()
        assert Survival([level], learns=False).cut(rows, room) == [min(k, int(kept)) for k in room]


def test_what_is_not_a_number_cuts_nothing():
    assert Survival([0.7]).cut(torch.tensor([[0.99, torch.nan, 0.1]]), [3]) == [3]


def test_acceptance_is_learned_where_it_is_known():
    """Of a confidence of 0.55 30 of 90 were accepted; what comes after a rejected token says nothing.

    Each bin begins with 3 of 4, and its neighbours count half.
    """
    survival = Survival([0.4])
    assert survival.cut(torch.tensor([[0.55, 0.9]]), [2]) == [2]
    for accepted in [1, 0, 0] * 30:
        survival.observe(torch.tensor([0.55, 0.05, 0.95]), accepted, drafted=3)
    assert survival.cut(torch.tensor([[0.55, 0.9]]), [2]) == [0]
    assert survival._acceptance(0.55) == (33 + (3 + 3) / 2) / (94 + (4 + 4) / 2)
    assert survival._acceptance(0.95) == 0.75 and survival._acceptance(0.05) == (3 + 3) / (34 + 4)


def test_a_slot_that_few_reach_is_not_drafted():
    """Half and a tenth of two rows survive the first slot, and the second slot's tokens are as good as all."""
    survival = Survival([0.2, 0.25, 0.2])
    survival._accepted[6:9], survival._tried[6:9] = [50.0] * 3, [100.0] * 3
    survival._accepted[1:4], survival._tried[1:4] = [10.0] * 3, [100.0] * 3
    expected = sum(survival._accepted) / sum(survival._tried) * 0.3
    for level, pays in ((expected - 0.01, True), (expected + 0.01, False)):
        survival.levels, survival.undrafted = [0.2, 0.0], [0.2, level]
        survival.begin([3, 3])
        assert survival.expects(0) and survival.keeps(0, [0.55, 0.05])
        assert survival.expects(1) is pays
    # What is replayed has no earlier rounds.
    fixed = Survival([0.9], learns=False)
    fixed.begin([3])
    assert not fixed.keeps(0, [0.5]) and fixed.expects(1)


MORE = {
    ("block", "confidence head"): lambda target: BlockProposer(block(target, enable_confidence_head=True)),
    ("medusa", "hydra chain"): lambda target: MedusaProposer(medusa(target, hydra=True), Tree.chain(LENGTH)),
}


@pytest.mark.parametrize("case", [*shapes(), *MORE], ids=case_id)
def test_replay_counts_the_rounds_of_the_decoder(target, case, monkeypatch):
    """Every drafter that the decoder cuts; what the decoder refuses to cut is not replayed either."""
    torch.manual_seed(3)  # some heads begin at random
    drafter = MORE[case](target) if case in MORE else proposer(*case, target)
    prompts = torch.randint(1, 97, (4, 5), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 24, "do_sample": False}
    written = autoregressive_generate(target, prompts, **options).sequences
    task = DraftTask(Sampler.of(0), 97, [None], 29, 3, True, False, target)
    texts = [WrittenText(text, 5, 24) for text in written]

    def replayed(level):
        return replay_acceptance(target, drafter, list(written), [5] * 4, [1, 3], 0, max_new_tokens=24, survival=level)

    if drafter.replay_refusal(False) is not None or (confidences := drafter.confidences(task, texts)) is None:
        with pytest.raises(InputError, match=r"^survival: expected chains"):
            speculative_generate(target, drafter, prompts[:1], draft_length=FixedLength(3, 0.5), **options)
        with pytest.raises(InputError):
            replayed(0.5)
        return

    rounds = []
    monkeypatch.setattr(
        FixedLength, "observe", lambda plan, accepted, draft, drafted: rounds.append((accepted, draft.confidence))
    )
    for prompt, known_NK in zip(prompts, confidences, strict=True):
        rounds.clear()
        speculative_generate(target, drafter, prompt[None], draft_length=FixedLength(3, 1e-9), **options)
        start = 0
        for accepted, confidence in rounds:
            if confidence is not None and len(confidence):  # up to the first token that the text does not have
                same = min(accepted + 1, len(confidence), 24 - start)
                assert torch.allclose(known_NK[start, :same], confidence[:same].float(), atol=1e-5)
            start += accepted + 1
    # Half of the texts' rounds do without a second token.
    level, drafted = float(torch.cat(confidences)[:, :2].prod(1).median()), set()
    for k in (1, 3):
        for prompt, text, replay in zip(prompts, written, replayed(level).texts, strict=True):
            out = speculative_generate(
                target, drafter, prompt[None], draft_length=FixedLength(k, level), **options,
                observer=lambda round: drafted.add(round.drafted),
            )  # fmt: skip
            assert torch.equal(out.sequences[0], text)
            assert replay.counts[k].num_drafts == out.counts.num_drafts
            assert replay.counts[k].num_accepted_tokens == out.counts.num_accepted_tokens
    assert len(drafted - {0}) > 1, drafted


def test_replay_without_a_known_confidence_is_refused(target):
    texts, prompts = [torch.arange(1, 9)], [4]
    with pytest.raises(InputError, match=r"^survival: expected chains whose confidence is known .*PromptLookupProp"):
        lookup = proposer("prompt_lookup", "chain", target)
        replay_acceptance(target, lookup, texts, prompts, [2], allow_biased=True, survival=0.5)
