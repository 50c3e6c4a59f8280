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
from draftsmith.decode.proposers.survival import Survival, as_length
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
        assert Survival(level).cut(rows, room) == [min(k, int(kept)) for k in room]


def test_what_is_not_a_number_cuts_nothing():
    assert Survival(0.7).cut(torch.tensor([[0.99, torch.nan, 0.1]]), [3]) == [3]


def test_a_length_that_is_not_given_is_the_proposers_own():
    assert [as_length(None, longest).longest for longest in (None, 3, 6)] == [4, 3, 6]
    assert as_length(FixedLength(2, 0.5), 3) == FixedLength(2, 0.5) and as_length(2, 3) == FixedLength(2)
    with pytest.raises(InputError, match=r"^draft_length: expected at most the 3 tokens .*, found 4$"):
        as_length(4, 3)


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

    accepted_of, sure, propose = [], [], drafter.propose

    def noted(*arguments):
        drafts = propose(*arguments)
        sure.append(drafts[0].confidence)
        return drafts

    monkeypatch.setattr(drafter, "propose", noted)
    for prompt, known_NK in zip(prompts, confidences, strict=True):
        accepted_of.clear(), sure.clear()
        speculative_generate(
            target, drafter, prompt[None], draft_length=FixedLength(3, 1e-9), **options,
            observer=lambda round: accepted_of.append(round.accepted),
        )  # fmt: skip
        start = 0
        for accepted, confidence in zip(accepted_of, sure, strict=True):
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
