"""Where two texts part, and what counts as a tie."""

import math

import pytest
import torch
from conftest import tiny_llama
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from draftsmith.decode import InputError, autoregressive_generate
from draftsmith.decode.measurement.exactness import first_mismatch
from draftsmith.decode.sampling import Sampler

VOCAB = 97
PROMPT = torch.tensor([3, 1, 4, 1, 5, 9])


def plain_text(model, prompt=PROMPT, new: int = 12) -> torch.Tensor:
    return autoregressive_generate(model, prompt[None], max_new_tokens=new, do_sample=False).sequences[0]


def logits_after(model, context: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(context[None]).logits[0, -1].float()


def replaced(text: torch.Tensor, position: int, token: int) -> torch.Tensor:
    other = text.clone()
    other[position] = token
    return other


def twins(dtype: torch.dtype):
    """A model whose tokens v and v + 48 have equal logits but for one unit in the last place of a weight."""
    model = tiny_llama(1, hidden=128).to(dtype)
    weight = model.lm_head.weight
    with torch.no_grad():
        for v in range(48):
            weight[v + 48] = weight[v]
            weight[v + 48, v] *= 1 + torch.finfo(dtype).eps
        weight[96] = 0.0  # has no twin, and is never the argmax
    return model


@pytest.mark.parametrize(("dtype", "position"), [(torch.float32, 6), (torch.bfloat16, 17)])
def test_a_wrong_token_is_no_tie(dtype, position):
    model = tiny_llama(0).to(dtype)
    text = plain_text(model)
    logits = logits_after(model, text[:position])
    wrong = int(logits.argmin())
    # What follows the first difference is not looked at.
    other = torch.cat([replaced(text, position, wrong)[: position + 1], text[position + 1 :].flip(0)])
    found = first_mismatch(model, text, other, 6)
    assert (found.position, found.expected, found.found) == (position, int(text[position]), wrong)
    assert found.margin == pytest.approx(float(logits[text[position]] - logits[wrong]), abs=found.tolerance)
    assert found.margin > 1 and not found.is_tie
    # The other way round the margin has the other sign, and it is no tie either.
    turned = first_mismatch(model, other, text, 6)
    assert turned.margin == pytest.approx(-found.margin) and not turned.is_tie


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twins_tie_and_the_runner_up_does_not(dtype):
    model = twins(dtype)
    text = plain_text(model)
    for position in range(6, len(text)):
        token = int(text[position])
        twin = (token + 48) % 96
        found = first_mismatch(model, text, replaced(text, position, twin), 6)
        assert found.is_tie, found
        runner_up = logits_after(model, text[:position])
        runner_up[[token, twin]] = -math.inf
        found = first_mismatch(model, text, replaced(text, position, int(runner_up.argmax())), 6)
        if found.margin > 0.5:  # larger than the tolerance in bfloat16 for logits below 8
            assert not found.is_tie, found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_tolerance_is_the_dtypes_resolution_at_the_largest_logit(dtype):
    model = tiny_llama(0).to(dtype)
    text = plain_text(model)
    logits = logits_after(model, text[:8])
    found = first_mismatch(model, text, replaced(text, 8, int(logits.argmin())), 6)
    assert found.tolerance == pytest.approx(8 * torch.finfo(dtype).eps * float(logits.abs().max()), rel=0.02)


def test_a_text_that_ends_early_is_no_tie(target):
    text = plain_text(target)
    shorter = text[:10]
    found = first_mismatch(target, text, shorter, 6)
    assert (found.position, found.expected, found.found) == (10, int(text[10]), None)
    assert math.isinf(found.margin) and not found.is_tie
    found = first_mismatch(target, shorter, text, 6)
    assert (found.position, found.expected, found.found) == (10, None, int(text[10]))
    assert not found.is_tie
    # An earlier difference comes first.
    other = replaced(shorter, 7, (int(text[7]) + 1) % VOCAB)
    found = first_mismatch(target, text, other, 6)
    assert found.position == 7 and found.found == int(other[7]) and math.isfinite(found.margin)
    # Texts that end with the prompt, and those that do not part.
    assert first_mismatch(target, text, PROMPT, 6).position == 6
    assert first_mismatch(target, text, text.clone(), 6) is None


def test_the_margin_is_that_of_the_processed_logits(target):
    sampler = Sampler(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)]), do_sample=False)
    text = plain_text(target)
    logits = logits_after(target, text[:8])
    token = next(v for v in text[:8].tolist() if v != int(text[8]))
    other = replaced(text, 8, token)

    def penalised(v: int) -> float:
        x = float(logits[v])
        return x if v not in text[:8].tolist() else x / 1.5 if x > 0 else x * 1.5

    plain, found = first_mismatch(target, text, other, 6), first_mismatch(target, text, other, 6, sampler)
    assert found.margin == pytest.approx(penalised(int(text[8])) - penalised(token), abs=1e-4)
    assert found.margin != pytest.approx(plain.margin, abs=1e-3)


def test_bad_texts_are_named(target):
    text = plain_text(target)
    for expected, found, length in (
        (text, replaced(text, 2, 90), 6),
        (text, text, 0),
        (text, text[:4], 6),
        (text[:4], text[:4], 6),
        (text[None], text, 6),
    ):
        with pytest.raises(InputError, match=r"^texts: expected "):
            first_mismatch(target, expected, found, length)
