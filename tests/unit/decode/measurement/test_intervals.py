"""Intervals of what is measured, and the independence of pairs."""

import numpy as np
import pytest
from scipy import stats

from draftsmith.decode.measurement import intervals
from draftsmith.decode.measurement.intervals import (
    Estimate,
    difference_interval,
    format_estimate,
    product_interval,
    ratio,
    ratio_difference,
    ratio_interval,
    ratio_product,
    ratios,
)
from draftsmith.decode.measurement.two_samples import two_sample_test


def data(prompts: int = 30, seed: int = 0, rng: np.random.Generator | None = None):
    """Emitted tokens and rounds of prompts that differ in how well they are drafted; the ratio of means is 3."""
    rng = rng or np.random.default_rng(seed)
    rounds = rng.integers(5, 30, prompts)
    tokens = rounds + rng.binomial(4 * rounds, rng.beta(2, 2, prompts))
    return tokens, rounds


def one_at_a_time(statistic, *columns) -> tuple[float, float]:
    """The reference: scipy's bootstrap of one statistic, which draws the same resamples from the same seed."""
    n = len(columns[0])
    t = stats.t.ppf(0.975, n - 1)
    found = stats.bootstrap(
        columns,
        lambda *drawn, axis: statistic(*(values.sum(axis) for values in drawn)),
        paired=True,
        n_resamples=intervals.RESAMPLES,
        confidence_level=2 * stats.norm.cdf(t * (n / (n - 1)) ** 0.5) - 1,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return tuple(found.confidence_interval)


@pytest.mark.parametrize("at_a_time", [intervals.AT_A_TIME, 7 * 31])
def test_estimates_that_share_one_resampling_are_those_of_one_at_a_time(monkeypatch, at_a_time):
    monkeypatch.setattr(intervals, "AT_A_TIME", at_a_time)  # weights in one block, or in many
    columns = {seed: (data(31, seed)[0] * 1.1, data(31, seed)[1] / 3) for seed in range(3)}
    for seed, estimate in ratios(columns).items():
        assert estimate.value == ratio(*columns[seed]).value
        assert estimate.ci95 == pytest.approx(one_at_a_time(lambda n, d: n / d, *columns[seed]), rel=1e-13)
    four = *columns[0], *columns[1]
    assert ratio_difference(*four).ci95 == pytest.approx(
        one_at_a_time(lambda n, d, n2, d2: n / d - n2 / d2, *four), rel=1e-12
    )
    assert ratio_product(*four).ci95 == pytest.approx(
        one_at_a_time(lambda n, d, n2, d2: n / d * n2 / d2, *four), rel=1e-12
    )


def test_value_is_the_ratio_of_sums_and_lies_in_the_interval():
    tokens, rounds = data()
    estimate = ratio(tokens, rounds)
    assert estimate.value == tokens.sum() / rounds.sum()
    assert estimate.value != pytest.approx(np.mean(tokens / rounds), rel=1e-4)
    low, high = estimate.ci95
    assert low < estimate.value < high
    assert estimate.n == 30 and estimate.to_dict() == {"value": estimate.value, "ci95": [low, high], "n": 30}


@pytest.mark.parametrize(
    ("estimate", "interval"), [(ratio_difference, difference_interval), (ratio_product, product_interval)]
)
def test_a_higher_confidence_level_widens_the_interval(estimate, interval):
    columns = *data(), *data(seed=1)
    wide, narrow = interval(*columns, confidence=0.99), interval(*columns, confidence=0.8)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]
    # By Student's t and by the bootstrap they are nearly the same, at the level where the bootstrap is good.
    assert interval(*columns, confidence=0.95) == pytest.approx(estimate(*columns).ci95, abs=0.1)


def test_an_interval_of_a_mean_is_students_at_any_level():
    values = np.random.default_rng(3).normal(5, 1, 12)
    for level in (0.8, 0.9999):
        wanted = stats.t.interval(level, 11, values.mean(), stats.sem(values))
        assert ratio_interval(values, np.ones(12), level) == pytest.approx(wanted, rel=1e-12)
    assert ratio_interval(values[:4], np.ones(4), 0.95) is None


def test_an_estimate_is_written_scaled_and_drawn_with_its_interval():
    estimate = Estimate(1.234, (1.2, 1.3), 9)
    assert format_estimate(estimate) == "1.23 ±0.05"
    assert format_estimate(estimate, "+.1f", "×", "interval") == "+1.2× [+1.2, +1.3]"
    assert format_estimate(estimate, "+.2f") == "+1.23 ±0.05"
    assert format_estimate(estimate, ".0%", spread="none") == "123%"
    assert format_estimate(Estimate(1.5, None, 1)) == "1.50"
    assert estimate.scaled(-2) == Estimate(-2.468, (-2.6, -2.4), 9)
    assert Estimate(1.25, (1.0, 2.0), 9).arms() == (0.25, 0.75) and Estimate(1.0, None, 1).arms() == (0.0, 0.0)
    assert Estimate(3.0, (1.0, 2.0), 9).arms() == (2.0, 0.0)  # an interval that does not hold the value
    assert format_estimate(None) == format_estimate(Estimate(None, None, 0)) == "–"


def test_what_cannot_be_estimated_is_none_and_never_zero():
    assert ratio([3], [2]) == Estimate(1.5, None, 1)
    assert ratio([0, 0], [0, 0]) == Estimate(None, None, 2)
    assert ratio([], []) == Estimate(None, None, 0)
    assert ratio_difference([1, 2], [1, 1], [1, 2], [0, 0]) == Estimate(None, None, 2)
    assert ratio_difference([4], [2], [3], [2]) == Estimate(0.5, None, 1)
    assert ratio([0] * 4, [1] * 4) == Estimate(0.0, None, 4)  # "95 %" would cover 87 %
    assert ratio([0] * 5, [1] * 5) == Estimate(0.0, (0.0, 0.0), 5)
    tokens, rounds = data()
    known, unknown = ratios({"known": (tokens, rounds), "unknown": (tokens, 0 * rounds)}).values()
    assert known == ratio(tokens, rounds) and unknown == Estimate(None, None, 30) and ratios({}) == {}


@pytest.mark.filterwarnings("error")
def test_a_resample_without_a_denominator_leaves_no_interval():
    assert ratio([1, 2, 0, 0, 0], [1, 0, 0, 0, 0]).ci95 is None


def test_pairing_removes_what_prompts_have_in_common():
    tokens, rounds = data()
    assert ratio_difference(tokens, rounds, tokens, rounds) == Estimate(0.0, (0.0, 0.0), 30)
    assert difference_interval(tokens, rounds, tokens, rounds, confidence=0.9999) == (0.0, 0.0)
    # One token a round more on every prompt: prompts differ widely, but not in that.
    better = ratio_difference(tokens + rounds, rounds, tokens, rounds)
    assert better.value == pytest.approx(1) and better.ci95 == pytest.approx([1, 1])
    shares = tokens / 7, rounds / 3  # whose sums are rounded
    assert ratio_difference(*shares, *shares) == Estimate(0.0, (0.0, 0.0), 30)
    assert ratio_product(*shares, *shares[::-1]).ci95 == pytest.approx((1, 1), abs=1e-15)


def test_intervals_are_over_prompts_not_tokens():
    tokens, rounds = data()
    low, high = ratio(tokens, rounds).ci95
    # The same tokens in four times as many independent prompts: half the width. Pooling would not tell them apart.
    spread = ratio(np.tile(tokens, 4), np.tile(rounds, 4)).ci95
    assert (high - low) / (spread[1] - spread[0]) == pytest.approx(2, rel=0.1)
    # Resampled apart, two halves are as certain as the whole.
    apart = ratio_product(np.tile(tokens, 4), np.tile(rounds, 4), [1] * 60, [1] * 60).ci95
    assert (apart[1] - apart[0]) / (spread[1] - spread[0]) == pytest.approx(1, rel=0.1)


def test_few_prompts_are_as_uncertain_as_students_t_says():
    """With denominators of 1 the ratio is a mean, whose interval is known; plain percentiles are 11 % narrower."""
    values = np.random.default_rng(3).normal(5, 1, 20)
    low, high = ratio(values, np.ones(20)).ci95
    wanted = stats.t.interval(0.95, 19, values.mean(), stats.sem(values))
    assert high - low == pytest.approx(wanted[1] - wanted[0], rel=0.03)


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
        two_sample_test(bigrams(rng, 2, 4, length=4), bigrams(rng, 2, 4, length=4), 0.1, seed).p_value
        for seed in range(60)
    ]
    assert 1 <= sum(p <= 0.1 for p in found) <= 13


@pytest.mark.parametrize("fault", ["temperature", "greedy", "repeated"])
def test_another_law_is_seen_without_the_target(fault):
    rng = np.random.default_rng(1)
    plain = bigrams(rng, 3, 20)
    assert two_sample_test(bigrams(rng, 3, 20), plain, 1e-3).p_value > 1e-3
    if fault == "temperature":
        other = bigrams(rng, 3, 20, temperature=0.5)
    elif fault == "greedy":
        other = bigrams(rng, 3, 20, temperature=0.02)
    else:
        other = [[text for text in of_prompt for _ in range(4)] for of_prompt in bigrams(rng, 3, 5)]
    assert two_sample_test(other, plain, 1e-3).p_value < 1e-3
