"""The distribution test itself: uniform under the null, and what it says of texts that were drawn from another law."""

import pytest
import torch
from conftest import perturbed, tiny_llama

from draftsmith.decode import InputError, autoregressive_generate
from draftsmith.decode.lossless import _transform, law_test, model_drafter
from draftsmith.decode.sampling import Law

VOCAB = 13
LAW = Law.of(1.0)


@pytest.fixture(scope="module")
def models():
    target = tiny_llama(3, VOCAB, layers=1, scale=10.0)
    return target, perturbed(target, 0.3)


def texts_of(model, rows=40, new=60, seed=0, **options):
    prompts = torch.randint(VOCAB, (rows, 3), generator=torch.Generator().manual_seed(1))
    out = autoregressive_generate(model, prompts, max_new_tokens=new, do_sample=True, top_k=0, seed=seed, **options)
    return [(text, 3) for text in out.sequences]


def test_the_transform_of_every_token_covers_the_unit_interval_once():
    p = torch.tensor([[0.2, 0.0, 0.5, 0.3]])
    for key in (torch.arange(4.0)[None], p, -p, torch.zeros(1, 4)):
        steps = []
        for token in (0, 2, 3):
            ends = [
                float(_transform(p, key, torch.tensor([token]), torch.tensor([u], dtype=torch.float64)))
                for u in (0.0, 1.0)
            ]
            assert ends[1] - ends[0] == pytest.approx(float(p[0, token]))
            steps.append(ends)
        steps.sort()
        assert [steps[0][0], steps[-1][1]] == pytest.approx([0, 1])
        assert [s[0] for s in steps[1:]] == pytest.approx([s[1] for s in steps[:-1]])


def test_p_values_are_uniform_over_right_samples(models):
    """Over 20 seeds the least of 20 uniform numbers is below 1e-3 with probability 2 %, their median near a half."""
    target, _ = models
    texts = [texts_of(target, seed=1000 * seed) for seed in range(6)]
    found = [law_test(target, t, LAW, seed=seed).tests["uniform by p"] for seed, t in enumerate(texts)]
    assert min(found) > 1e-3 and max(found) > 0.1


def test_another_law_and_another_model_are_seen(models):
    target, other = models
    texts = texts_of(target, rows=80)
    assert law_test(target, texts, LAW).p_value > 1e-3
    assert law_test(target, texts, Law.of(0.8)).p_value < 1e-6
    with_drafter = law_test(target, texts_of(other, rows=80), LAW, model_drafter(other, LAW, VOCAB))
    assert with_drafter.p_value < 1e-10
    assert with_drafter.tests["uniform by q − p"] < 1e-10


def test_a_token_that_the_law_rules_out_decides(models):
    target, _ = models
    result = law_test(target, texts_of(target), Law.of(1.0, top_k=2))
    assert result.num_impossible > 0 and result.p_value == 0
    assert result.to_dict()["num_tokens"] == 2400


def test_tokens_that_hang_together_are_seen(models):
    """Each token alone has its law, but every other one is drawn with the random number of the one before it."""
    target, _ = models
    generator = torch.Generator().manual_seed(0)
    texts = []
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
        texts = [(row, 3) for row in rows]
    result = law_test(target, texts, LAW)
    assert result.tests["uniform by p"] > 1e-4
    assert result.tests["independent by p"] < 1e-10


def test_bad_input_is_named(models):
    target, _ = models
    with pytest.raises(InputError, match="law: expected sampling, found T=0"):
        law_test(target, [], Law.of(0.0))
    with pytest.raises(InputError, match="texts: expected at least 2000 tokens, found 60"):
        law_test(target, texts_of(target, rows=1), LAW)
    with pytest.raises(InputError, match="prompt_length: expected at least 1, found 0"):
        law_test(target, [(torch.tensor([1, 2]), 0)], LAW)
