"""Replay of long texts a chunk at a time, against their whole replay."""

import pytest
import torch
from conftest import tiny_llama
from families import FAMILIES, MIXTURES, STATEFUL, UNFIT, tiny_model
from specimens import proposer, shapes

from draftsmith.decode import autoregressive_generate, replay_acceptance
from draftsmith.decode.proposers.renumbered import renumber_draft
from draftsmith.decode.replay import texts
from draftsmith.decode.replay.texts import WrittenText, chunks, keep_last, teacher_forced

VOCAB, PROMPTS, NEW, GAMMAS = 97, (6, 9), 23, (1, 3)


def test_chunks_cover_a_text_without_overlap(monkeypatch):
    monkeypatch.setattr(texts, "LOGITS_AT_A_TIME", 5 * VOCAB + 1)
    assert list(chunks(12, VOCAB)) == [(0, 5), (5, 10), (10, 12)]
    assert list(chunks(11, VOCAB, first=1)) == [(1, 5), (5, 10), (10, 11)]
    assert list(chunks(0, VOCAB)) == list(chunks(1, VOCAB, first=1)) == []
    monkeypatch.setattr(texts, "LOGITS_AT_A_TIME", 1)  # one token is the least
    assert list(chunks(3, VOCAB, first=1)) == [(1, 2), (2, 3)]


def test_the_last_chunk_is_remembered():
    asked = []

    def at_tokens(first, end):
        asked.append((first, end))
        return torch.arange(first, end)

    kept = keep_last(at_tokens)
    for first, end in ((0, 5), (1, 4), (5, 9), (5, 9), (4, 6), (9, 9)):
        assert kept(first, end).tolist() == list(range(first, end))
    assert asked == [(0, 5), (5, 9), (4, 6), (9, 9)]


CAUSAL = [name for name in (*FAMILIES, *MIXTURES, *STATEFUL, *UNFIT) if name != "bert-generation"]


@pytest.mark.parametrize("name", CAUSAL)
@torch.inference_mode()
def test_logits_of_a_chunk_are_the_models_own(name):
    """With the family's caps and factors; the model's forward is as it was."""
    model = tiny_model(name)
    ids = torch.randint(2, 60, (19,), generator=torch.Generator().manual_seed(1))
    whole = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
    shorter = WrittenText(ids[:9], 4, 5)
    logits, of_shorter = teacher_forced(model, [WrittenText(ids, 3, 16), shorter])
    for first, end in ((0, 16), (3, 4), (7, 15)):
        torch.testing.assert_close(logits(first, end), whole[2 + first : 2 + end], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(of_shorter(1, 4), whole[4:7], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(input_ids=ids[None, :-1], use_cache=False).logits[0], whole)


@torch.inference_mode()
def test_a_view_over_other_ids_writes_them_in_chunks_too():
    ids = {i: (i + 3) % VOCAB for i in range(VOCAB) if i != 5}
    view, text = renumber_draft(tiny_llama(0), ids, 5), torch.randint(VOCAB, (12,))
    (logits,) = teacher_forced(view, [WrittenText(text, 2, 10)])
    torch.testing.assert_close(logits(3, 9), view(input_ids=text[None, :-1]).logits[0, 4:10])


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0, VOCAB, layers=4)


@pytest.fixture(scope="module")
def written(target):
    """Texts at each temperature."""

    def write(length: int, temperature: float) -> torch.Tensor:
        torch.manual_seed(length)
        ids = torch.randint(1, 9, (1, length))
        options = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        return autoregressive_generate(target, ids, max_new_tokens=NEW, **options).sequences[0]

    return {temperature: [write(length, temperature) for length in PROMPTS] for temperature in (0.0, 1.0)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("kind", "shape"), shapes())
def test_replay_in_chunks_is_the_whole_texts(target, written, monkeypatch, kind, shape, temperature):
    drafter = proposer(kind, shape, target)
    if drafter.replay_refusal(temperature > 0) is not None:
        return

    def replay():
        return replay_acceptance(target, drafter, written[temperature], PROMPTS, GAMMAS, temperature).texts

    whole, most = replay(), []
    head = target.lm_head.register_forward_hook(lambda module, inputs, logits: most.append(logits.shape[-2]))
    for size in (1, 4):
        monkeypatch.setattr(texts, "LOGITS_AT_A_TIME", size * VOCAB)
        for expected, found in zip(whole, replay(), strict=True):
            for k in GAMMAS:
                for name, count in vars(expected.counts[k]).items():
                    assert getattr(found.counts[k], name) == pytest.approx(count, rel=1e-6 if temperature else 0), name
            assert found.acceptance == pytest.approx(expected.acceptance, abs=1e-6)
            assert found.overlap == pytest.approx(expected.overlap, abs=1e-5)
        assert max(most) <= size + max(GAMMAS) - 1  # the tokens that the rounds of a chunk reach
    head.remove()


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_p": 0.8}])
def test_texts_are_checked_and_their_ties_counted_once(target, monkeypatch, settings):
    """However often drafters ask for a chunk again."""
    out = autoregressive_generate(target, torch.tensor([[1, 2, 3]]), max_new_tokens=40, do_sample=True, **settings)
    text, drafter = out.sequences[0], proposer("unigram", "of the text", target)
    whole = replay_acceptance(target, drafter, [text], [3], [3], **settings)
    monkeypatch.setattr(texts, "LOGITS_AT_A_TIME", 7 * VOCAB)
    counted = []
    monkeypatch.setattr("draftsmith.decode.measurement.replay.readmit_ties", lambda *args: counted.append(1) or 1)
    replay = replay_acceptance(target, drafter, [text], [3], [3], **settings)
    assert replay.alpha.value == pytest.approx(whole.alpha.value, abs=1e-6)
    assert replay.num_ties == 6 < len(counted)
