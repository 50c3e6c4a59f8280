"""Where texts part at T=0, and what counts as a tie."""

import pytest
import torch
from conftest import tiny_llama

from draftsmith.decode import InputError, autoregressive_generate
from draftsmith.decode.audit import first_divergence
from draftsmith.decode.sampling import Law

PROMPT = torch.tensor([[3, 1, 4]])


@pytest.fixture(scope="module")
def written(target):
    return autoregressive_generate(target, PROMPT, max_new_tokens=12, do_sample=False).sequences[0]


def test_equal_texts_do_not_part(target, written):
    assert first_divergence(target, written, written.clone(), 3) is None


def test_a_wrong_token_is_no_tie(target, written):
    other = written.clone()
    other[7] = (other[7] + 1) % 97
    other[9] = 0  # what comes after the first difference does not count
    found = first_divergence(target, written, other, 3)
    logits = target(written[None, :7]).logits[0, -1]
    assert (found.position, found.expected, found.found) == (7, int(written[7]), int(other[7]))
    assert found.margin == pytest.approx(float(logits[written[7]] - logits[other[7]]), abs=1e-5)
    assert found.margin > 0.1 > found.tolerance and not found.is_tie


def test_the_margin_is_that_of_processed_logits(target, written):
    other = written.clone()
    other[5] = (other[5] + 1) % 97
    plain, halved = (first_divergence(target, written, other, 3, Law.of(t)) for t in (1.0, 2.0))
    assert halved.margin == pytest.approx(plain.margin / 2, rel=1e-5)


def test_near_equal_logits_are_a_tie(written):
    """Two rows of the head are made equal but for a bit: either order of their tokens is the target's."""
    twin = tiny_llama(0)
    expected = int(written[6])
    with torch.no_grad():
        twin.lm_head.weight[50] = twin.lm_head.weight[expected] * (1 + 1e-7)
    other = written.clone()
    other[6] = 50
    found = first_divergence(twin, written, other, 3)
    assert found.is_tie and abs(found.margin) < 1e-5


def test_a_text_that_ends_early_is_no_tie(target, written):
    found = first_divergence(target, written, written[:9], 3)
    assert (found.position, found.expected, found.found, found.is_tie) == (9, int(written[9]), None, False)
    found = first_divergence(target, written[:9], written, 3)
    assert (found.position, found.expected, found.found, found.is_tie) == (9, None, int(written[9]), False)


def test_different_prompts_are_refused(target, written):
    other = written.clone()
    other[1] = 9
    with pytest.raises(InputError, match="texts: expected the same prompt of 3 ≥ 1 tokens, found different ones"):
        first_divergence(target, written, other, 3)
    with pytest.raises(InputError, match="texts: expected the same prompt of 0"):
        first_divergence(target, written, other, 0)
