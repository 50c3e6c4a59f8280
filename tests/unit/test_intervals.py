"""Intervals over prompts: what they hold, and where there are none. How often they are right: `test_coverage.py`."""

import numpy as np
import pytest
from scipy import stats

from draftsmith.decode.measurement.intervals import ratio, ratio_difference


def data(prompts: int = 30, seed: int = 0, rng: np.random.Generator | None = None):
    """Emitted tokens and rounds of prompts that differ in how well they are drafted; the ratio of means is 3."""
    rng = rng or np.random.default_rng(seed)
    rounds = rng.integers(5, 30, prompts)
    tokens = rounds + rng.binomial(4 * rounds, rng.beta(2, 2, prompts))
    return tokens, rounds


def test_value_is_the_ratio_of_sums_and_lies_in_the_interval():
    tokens, rounds = data()
    estimate = ratio(tokens, rounds)
    assert estimate["value"] == tokens.sum() / rounds.sum()
    assert estimate["value"] != pytest.approx(np.mean(tokens / rounds), rel=1e-4)
    low, high = estimate["ci95"]
    assert low < estimate["value"] < high
    assert list(estimate) == ["value", "ci95"]


def test_the_level_names_the_interval_and_widens_it():
    tokens, rounds = data()
    wide, narrow = ratio(tokens, rounds, 0.99)["ci99"], ratio(tokens, rounds, 0.8)["ci80"]
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_the_same_data_give_the_same_interval():
    assert ratio(*data()) == ratio(*data())


def test_what_cannot_be_estimated_is_none_and_never_zero():
    assert ratio([3], [2]) == {"value": 1.5, "ci95": None}
    assert ratio([0, 0], [0, 0]) == {"value": None, "ci95": None}
    assert ratio([], []) == {"value": None, "ci95": None}
    assert ratio_difference([1, 2], [1, 1], [1, 2], [0, 0]) == {"value": None, "ci95": None}
    assert ratio_difference([4], [2], [3], [2]) == {"value": 0.5, "ci95": None}
    assert ratio([0, 0], [1, 2]) == {"value": 0.0, "ci95": [0.0, 0.0]}


@pytest.mark.filterwarnings("error")  # scipy would warn of another method's interval
def test_a_resample_without_a_denominator_leaves_no_interval():
    assert ratio([1, 2, 0], [1, 0, 0])["ci95"] is None


def test_paired_difference_of_identical_data_is_exactly_zero():
    tokens, rounds = data()
    assert ratio_difference(tokens, rounds, tokens, rounds) == {"value": 0.0, "ci95": [0.0, 0.0]}


def test_pairing_removes_what_prompts_have_in_common():
    tokens, rounds = data()
    better = ratio_difference(tokens + rounds, rounds, tokens, rounds)
    # One token a round more on every prompt: prompts differ widely, but not in that.
    assert better["value"] == pytest.approx(1)
    assert better["ci95"] == pytest.approx([1, 1])
    low, high = ratio(tokens, rounds)["ci95"]
    assert high - low > 0.3


def test_intervals_are_over_prompts_not_tokens():
    tokens, rounds = data()
    low, high = ratio(tokens, rounds)["ci95"]
    # The same tokens in four times as many independent prompts: half the width. Pooling would not tell them apart.
    spread = ratio(np.tile(tokens, 4), np.tile(rounds, 4))["ci95"]
    assert (high - low) / (spread[1] - spread[0]) == pytest.approx(2, rel=0.1)


def test_few_prompts_are_as_uncertain_as_students_t_says():
    """With denominators of 1 the ratio is a mean, whose interval is known; plain percentiles are 11 % narrower."""
    values = np.random.default_rng(3).normal(5, 1, 20)
    low, high = ratio(values, np.ones(20))["ci95"]
    wanted = stats.t.interval(0.95, 19, values.mean(), stats.sem(values))
    assert high - low == pytest.approx(wanted[1] - wanted[0], rel=0.03)
    assert ratio(values[:2], np.ones(2))["ci95"] == sorted(values[:2])
