"""The checks of losslessness themselves: right under the null, and what they say of texts that came about otherwise."""

import pytest
import torch
from conftest import perturbed, tiny_llama
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from draftsmith.decode import DraftModelProposer, InputError, PromptLookupProposer, autoregressive_generate
from draftsmith.decode.measurement import distribution_test as lossless
from draftsmith.decode.measurement.distribution_test import (
    distribution_test,
    plain_texts,
    prepared_sampler,
    sample_texts,
    speculative_texts,
)
from draftsmith.decode.measurement.exactness import first_difference
from draftsmith.decode.measurement.uniformity import transform
from draftsmith.decode.replay.texts import model_distributions
from draftsmith.decode.sampling import Sampler

VOCAB = 13
SAMPLER = Sampler.of(1.0)
PENALTIES = Sampler(
    LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(2), TemperatureLogitsWarper(0.8)]
    ),
    do_sample=True,
)


@pytest.fixture(scope="module")
def models():
    target = tiny_llama(3, VOCAB, layers=1, scale=10.0)
    return target, perturbed(target, 0.3)


def texts_of(model, rows=40, new=60, seed=0, **options):
    prompts = torch.randint(VOCAB, (rows, 3), generator=torch.Generator().manual_seed(1))
    out = autoregressive_generate(model, prompts, max_new_tokens=new, do_sample=True, top_k=0, seed=seed, **options)
    return [(text, 3) for text in out.sequences]


def ragged():
    """Prompts and texts of several lengths, one of them without a new token."""
    generator = torch.Generator().manual_seed(4)
    return [(torch.randint(VOCAB, (n,), generator=generator), k) for n, k in ((9, 2), (5, 5), (12, 1), (7, 4))]


def test_the_transform_of_every_token_covers_the_unit_interval_once():
    p = torch.tensor([[0.2, 0.0, 0.5, 0.3]])
    for key in (torch.arange(4.0)[None], p, -p, torch.zeros(1, 4)):
        steps = []
        for token in (0, 2, 3):
            ends = [
                float(transform(p, key, torch.tensor([token]), torch.tensor([u], dtype=torch.float64)))
                for u in (0.0, 1.0)
            ]
            assert ends[1] - ends[0] == pytest.approx(float(p[0, token]))
            steps.append(ends)
        steps.sort()
        assert [steps[0][0], steps[-1][1]] == pytest.approx([0, 1])
        assert [s[0] for s in steps[1:]] == pytest.approx([s[1] for s in steps[:-1]])


@pytest.mark.parametrize("sampler", [SAMPLER, Sampler.of(0.7, top_p=0.9), PENALTIES])
@pytest.mark.parametrize("columns", [1, 4, 100])
def test_laws_of_padded_texts_in_blocks_are_those_of_each_text_alone(models, sampler, columns):
    texts = ragged()
    ids, wanted = lossless._aligned(texts)
    assert wanted.sum(1).tolist() == [7, 0, 11, 3]
    with torch.inference_mode():
        found = torch.cat(list(model_distributions(models[0], sampler, VOCAB + 2)(ids, wanted, columns)))
    place = 0
    for position in range(1, ids.shape[1]):  # column after column
        for text, prompt_length in texts:
            if prompt_length <= position < len(text):
                context = text[:position]
                p = sampler.probabilities(models[0](context[None]).logits[0, -1:], [context])[0]
                torch.testing.assert_close(found[place, :VOCAB], p, atol=1e-5, rtol=0)
                assert not found[place, VOCAB:].any()
                place += 1
    assert place == len(found) == 21


def test_what_lookup_would_draft_is_one_hot(models):
    text = torch.tensor([1, 2, 3, 1, 2, 3])
    ids, wanted = lossless._aligned([(text, 2), (text[:5], 4)])
    (q,) = PromptLookupProposer().distributions_after(models[0], SAMPLER)(ids, wanted, 100)
    # Columns 2 to 5: nothing to look up in 1 2 or 1 2 3, then what followed.
    assert [row.nonzero().flatten().tolist() for row in q] == [[], [], [2], [2], [3]]


def test_memory_is_bounded_and_blocks_change_nothing(models, monkeypatch):
    texts = texts_of(models[0])
    whole = distribution_test(models[0], texts, SAMPLER, model_distributions(models[1], SAMPLER), batch_size=40)
    forwards = []
    model_forward = type(models[0]).forward

    def watched(self, *args, **kwargs):
        output = model_forward(self, *args, **kwargs)
        forwards.append(output.logits.numel())
        return output

    monkeypatch.setattr(lossless, "ENTRIES", 40 * VOCAB * 10)
    monkeypatch.setattr(type(models[0]), "forward", watched)
    blocks = distribution_test(models[0], texts, SAMPLER, model_distributions(models[1], SAMPLER), batch_size=40)
    assert max(forwards) <= 40 * VOCAB * 10 and len(forwards) == 2 * 7
    assert blocks.num_tokens == whole.num_tokens == 2400
    for name, test in whole.tests.items():  # the random points are other ones, and no more than they
        assert blocks.tests[name].degrees_of_freedom == test.degrees_of_freedom
        assert min(blocks.tests[name].p_value, test.p_value) > 1e-4


def test_another_law_and_another_model_are_seen(models):
    target, other = models
    texts = texts_of(target, rows=80)
    assert distribution_test(target, texts, SAMPLER).p_value > 1e-3
    assert distribution_test(target, texts, Sampler.of(0.8)).p_value < 1e-6
    with_drafter = distribution_test(
        target, texts_of(other, rows=80), SAMPLER, model_distributions(other, SAMPLER, VOCAB)
    )
    assert with_drafter.p_value < 1e-10
    assert with_drafter.tests["uniform by q − p"].p_value < 1e-10


def test_processors_that_look_back_are_part_of_the_law(models):
    options = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "temperature": 0.8}
    texts = texts_of(models[0], **options)
    assert distribution_test(models[0], texts, PENALTIES).p_value > 1e-3
    assert distribution_test(models[0], texts, Sampler.of(0.8)).p_value < 1e-6
    prepared = prepared_sampler(models[0], do_sample=True, top_k=0, **options)
    assert prepared.do_sample
    assert [type(p) for p in prepared.processors] == [type(p) for p in PENALTIES.processors]
    assert (
        distribution_test(models[0], texts, prepared).p_value == distribution_test(models[0], texts, PENALTIES).p_value
    )


def test_a_token_that_the_law_rules_out_decides_and_its_place_is_told(models):
    texts = texts_of(models[0])
    result = distribution_test(models[0], texts, Sampler.of(1.0, top_k=2))
    assert result.num_impossible > 16 == len(result.impossible) and result.p_value == 0
    for text, position in result.impossible:
        tokens = texts[text][0]
        likely = models[0](tokens[None, :position]).logits[0, -1].topk(2).indices.tolist()
        assert position >= 3 and int(tokens[position]) not in likely


def test_tokens_that_hang_together_are_seen(models):
    """Each token alone has its law, but every other one is drawn with the random number of the one before it."""
    target, _ = models
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        rows = torch.randint(VOCAB, (40, 3), generator=generator)
        for i in range(60):
            if i % 2 == 0:
                u = torch.rand(40, 1, generator=generator)
            p = target(rows).logits[:, -1].softmax(-1)
            # By falling p, so that the same u means an equally likely token.
            order = p.argsort(-1, descending=True)
            place = torch.searchsorted(p.gather(1, order).cumsum(-1), u).clamp(max=VOCAB - 1)
            rows = torch.cat([rows, order.gather(1, place)], dim=1)
    result = distribution_test(target, [(row, 3) for row in rows], SAMPLER)
    assert result.tests["uniform by p"].p_value > 1e-4
    assert result.tests["independent by p"].p_value < 1e-10


def test_greedy_texts_are_compared_with_plain_ones(models):
    target, draft = models
    prompts = [text[:k] for text, k in ragged()]
    plain = plain_texts(target, prompts, max_new_tokens=12)
    assert [len(text) for text in plain] == [14, 17, 13, 16]
    together = plain_texts(target, prompts, batch_size=3, max_new_tokens=12)
    assert all(torch.equal(text, expected) for text, expected in zip(together, plain, strict=True))
    for proposer in (DraftModelProposer(draft), PromptLookupProposer()):
        texts = speculative_texts(target, proposer, prompts, batch_size=3, max_new_tokens=12)
        assert all(torch.equal(text, expected) for text, expected in zip(texts, plain, strict=True))
    shorter = speculative_texts(target, PromptLookupProposer(), prompts, max_new_tokens=6)
    places = [first_difference(text.tolist(), longer.tolist()) for text, longer in zip(shorter, plain, strict=True)]
    assert places == [len(prompt) + 6 for prompt in prompts]


def test_sampled_texts_hold_emitted_tokens_alone(models):
    prompts = [text[:k] for text, k in ragged()]
    texts, counts = sample_texts(
        models[0], DraftModelProposer(models[1]), prompts, 150, batch_size=4, max_new_tokens=20, top_k=0, eos_token_id=4
    )
    assert sum(len(text) - k for text, k in texts) == counts.num_emitted_tokens >= 150
    assert len(texts) > 8
    for i, (text, k) in enumerate(texts):
        new = text[k:].tolist()
        assert torch.equal(text[:k], prompts[i % 4])
        assert 4 not in new[:-1] and (new[-1] == 4 or len(new) == 20)
    assert counts.num_emitted_tokens - len(texts[-1][0]) + texts[-1][1] < 150  # no text more than it takes
    again = [tuple(text.tolist()) for text, _ in texts]
    assert len(set(again)) > 0.9 * len(again)  # other seeds each time round


def test_bad_input_is_named(models):
    target, _ = models
    for texts, sampler, field in (
        ([], Sampler.of(0.0), "sampler"),
        (texts_of(target, rows=1), SAMPLER, "texts"),
        ([], SAMPLER, "texts"),
        ([(torch.tensor([1, 2]), 0)], SAMPLER, "prompt_length"),
    ):
        with pytest.raises(InputError, match=f"^{field}: expected "):
            distribution_test(target, texts, sampler)
