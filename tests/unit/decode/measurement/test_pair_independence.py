"""Tests of pairs of texts and of two decoders' texts: valid p-values, and their power."""

from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import ncx2

from draftsmith.decode.measurement.pair_independence import BettingTest, PairTests
from draftsmith.decode.measurement.two_samples import _beginnings, _grams, two_sample_tests
from draftsmith.decode.measurement.uniformity import detectable_departures


def test_bets_are_fair():
    """Over all outcomes of five places the expectation of what it is worth is 1."""
    chances = torch.tensor([0.1, 0.5, 0.9, 0.3, 0.0], dtype=torch.float64)
    expectation = 0.0
    for outcome in product((0.0, 1.0), repeat=4):
        agreed = torch.tensor([*outcome, 0.0], dtype=torch.float64)
        bets = BettingTest()
        bets.add(agreed, chances)
        worth = float((bets._logs.logsumexp(0)).exp()) / len(bets._logs)
        expectation += float(torch.where(agreed == 1, chances, 1 - chances).prod()) * worth
    assert expectation == pytest.approx(1)


def test_texts_that_agree_too_often_or_too_rarely_are_seen():
    places = torch.full((200,), 0.3, dtype=torch.float64)
    for agreed, expected in ((1.0, True), (0.0, True), (None, False)):
        bets = BettingTest()
        seen = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1, 0, 0] * 20).double() if agreed is None else places * 0 + agreed
        bets.add(seen, places)
        result = bets.result()
        assert (result.p_value < 1e-9) is expected
        assert (result.places, result.expected) == (200, pytest.approx(60))
    assert (result.observed, result.p_value) == (60, 1.0)


def test_what_never_varies_says_nothing():
    bets = BettingTest()
    bets.add(torch.ones(50).double(), torch.ones(50).double())
    bets.add(torch.zeros(50).double(), torch.zeros(50).double())
    assert bets.result().p_value == pytest.approx(1.0)


def test_a_text_may_not_be_in_two_pairs_of_a_kind():
    with pytest.raises(ValueError, match="found one in two"):
        PairTests({"neighbours": [(0, 1), (1, 2)]}, ["id"])


def test_the_places_of_pairs_are_found_in_ragged_batches():
    """Texts 2 and 3 are the second batch; in its columns 0 to 2 the first has tokens 0 and 2, the other 1 and 2."""
    beside = PairTests({"pair": [(0, 1), (2, 3)], "apart": [(1, 2)]}, ["id"])
    beside.begin(2, 2)
    block = torch.tensor([[True, False], [False, True], [True, True]])
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.25, 0.75], [0.5, 0.5]])
    beside.add_block(p, torch.tensor([0, 1, 1, 1]), block)
    beside.end(torch.tensor([[[0.1, 0.0], [0.0, 0.2], [0.3, 0.4]]], dtype=torch.float64), block)
    agreement = beside._betting["pair"].result()
    assert (agreement.places, agreement.observed, agreement.expected) == (1, 1, 0.5)
    assert beside._both["pair"][-1].tolist() == [[[pytest.approx(0.3)], [pytest.approx(0.4)]]]
    assert sorted(beside._first[-1][0].tolist()) == pytest.approx([0.1, 0.2])
    assert beside._betting["apart"].result().places == 0


def test_what_a_test_finds_is_what_it_finds():
    """The share that it names is found nine times of ten: simulated, off by 0.1 with probability 1e-4."""
    tokens, level, rounds = 5000, 1e-3, 160
    unlikely, variation = detectable_departures(tokens, level)
    generator = np.random.default_rng(0)
    for kind in ("unlikely", "leaning"):
        law = np.full(50, 0.02)
        if kind == "unlikely":
            law = law * (1 - unlikely)
            law[0] += unlikely
        else:
            law[:25] *= 1 + 2 * variation
            law[25:] *= 1 - 2 * variation
        counts = generator.multinomial(tokens, law, size=rounds)
        statistics = ((counts - tokens / 50) ** 2 / (tokens / 50)).sum(1)
        limit = ncx2.isf(level, 49, 0)
        assert abs((statistics > limit).mean() - 0.9) < 0.1


def test_two_samples_are_compared_by_beginnings_and_by_tokens():
    texts = [[1, 2, 3], [1, 2, 4], [2], []]
    assert _beginnings(texts).tolist() == [[3, 2, 0, 0], [2, 3, 0, 0], [0, 0, 3, 0], [0, 0, 0, 3]]
    grams = _grams(texts)
    assert grams[0, 1] == pytest.approx(3 / 5) and grams[0, 2] == pytest.approx(5**-0.5) and grams[3].sum() == 0


def bigrams(rng, prompts, texts, temperature=1.0, length=8):
    """Texts of a Markov chain over 12 tokens, the same in every call."""
    logits = np.random.default_rng(7).normal(size=(12, 12)) * 2 / temperature
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    found = []
    for prompt in range(prompts):
        of_prompt = []
        for _ in range(texts):
            token, text = prompt, []
            for _ in range(length):
                token = int(rng.choice(12, p=p[token]))
                text.append(token)
            of_prompt.append(text)
        found.append(of_prompt)
    return found


def test_shuffled_p_values_are_exact():
    """Of 60 comparisons of one law at 10 % between 1 and 13 fail, but for a chance of 1 %."""
    rng = np.random.default_rng(0)
    found = [
        two_sample_tests(bigrams(rng, 2, 4, length=4), bigrams(rng, 2, 4, length=4), 0.1, seed)["beginnings"].p_value
        for seed in range(60)
    ]
    assert 1 <= sum(p <= 0.1 for p in found) <= 13


@pytest.mark.parametrize("fault", ["temperature", "greedy", "repeated"])
def test_another_law_is_seen_without_the_target(fault):
    rng = np.random.default_rng(1)
    plain = bigrams(rng, 3, 20)
    assert min(test.p_value for test in two_sample_tests(bigrams(rng, 3, 20), plain, 1e-3).values()) > 1e-3
    if fault == "temperature":
        other = bigrams(rng, 3, 20, temperature=0.5)
    elif fault == "greedy":
        other = bigrams(rng, 3, 20, temperature=0.02)
    else:
        other = [[text for text in of_prompt for _ in range(4)] for of_prompt in bigrams(rng, 3, 5)]
    assert min(test.p_value for test in two_sample_tests(other, plain, 1e-3).values()) < 1e-3
