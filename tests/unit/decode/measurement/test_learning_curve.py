"""Forecasts of τ over the text: the curve is found again, and what is not known widens the interval."""

import numpy as np
import pytest

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.learning_curve import forecast

SIZES = np.array([1.0, 2.0, 4.0, 8.0]) * 1e4
TOKENS = 64.0


def truth(size: np.ndarray | float) -> np.ndarray:
    return 2.6 - 0.8 * (size / 1e4) ** -0.5


def replayed(taus, prompts=64, noise=0.05):
    """Each prompt's tokens and rounds: some prompts are easier at all sizes, and each has its own luck at each."""
    rng = np.random.default_rng(0)
    easier, luck = rng.normal(0, 0.1, prompts), rng.normal(0, noise, (len(taus), prompts))
    return np.full((len(taus), prompts), TOKENS), TOKENS / np.asarray(taus)[:, None] * (1 + easier + luck)


def alike(taus):
    return np.full((len(taus), 6), TOKENS), np.repeat(TOKENS / np.asarray(taus)[:, None], 6, axis=1)


def width(found) -> float:
    return found.ci95[1] - found.ci95[0]


def test_a_curve_without_noise_is_found_again():
    tokens, rounds = alike(truth(SIZES))
    near = forecast(SIZES[::-1], tokens, rounds[::-1], 2.0, luck=1e-5)  # in any order
    assert near.value == pytest.approx(truth(16e4), abs=1e-3)
    assert forecast(SIZES, tokens, rounds, 16.0, luck=1e-5).value == pytest.approx(truth(128e4), abs=0.01)
    # All prompts are alike, and all runs: there is nothing that could have been otherwise.
    assert near.ci95 == pytest.approx((near.value,) * 2, abs=2e-3)


def test_the_luck_of_runs_and_few_prompts_widen_a_forecast():
    for times in (2.0, 10.0):
        sure, unsure = (forecast(SIZES, *alike(truth(SIZES)), times, luck) for luck in (0.001, 0.05))
        assert width(sure) < 0.1 and width(unsure) > 4 * 0.05 * 0.75
    # Another run of as much text has its own luck, in addition to what the curve's runs had.
    assert width(forecast(SIZES, *alike(truth(SIZES)), 1.0, luck=0.05)) > 4 * 0.05 * 1.2
    # What misses the curve by more than was known says that luck is greater.
    missed = forecast(SIZES, *alike(truth(SIZES) + np.array([0.2, -0.2, 0.2, -0.2])), 2.0)
    assert width(missed) > 1.5 * width(forecast(SIZES, *alike(truth(SIZES)), 2.0))
    few, many = (width(forecast(SIZES, *replayed(truth(SIZES), prompts=n), 2.0, luck=1e-3)) for n in (16, 256))
    assert many < 0.5 * few


def test_three_amounts_or_prompts_give_no_interval():
    found = forecast(SIZES[:3], *replayed(truth(SIZES[:3])), 2.0)
    assert found.ci95 is None and found.value == pytest.approx(truth(8e4), abs=0.1)
    found = forecast(SIZES, *replayed(truth(SIZES), prompts=3), 2.0)
    assert found.ci95 is None and found.value is not None


def test_text_that_brings_nothing_is_a_flat_curve():
    found = forecast(SIZES, *alike([2.2, 2.1, 2.0, 1.9]), 2.0)
    assert found.value == pytest.approx(np.mean([2.2, 2.1, 2.0, 1.9]))


def test_what_grows_as_the_logarithm_is_forecast_to_do_so():
    for times, expected in ((2.0, 2.4), (4.0, 2.7)):
        found = forecast(SIZES, *alike([1.2, 1.5, 1.8, 2.1]), times, luck=1e-4)
        assert found.value == pytest.approx(expected, abs=0.02)


def test_what_makes_no_curve_is_refused():
    for sizes, rounds, field in (
        ([1.0, 2.0, 2.0], 1.0, "sizes"),
        ([0.0, 1.0], 1.0, "sizes"),
        ([1.0, 2.0], 0.0, "rounds"),
    ):
        shape = len(sizes), 4
        with pytest.raises(InputError, match=f"{field}: "):
            forecast(sizes, np.ones(shape), np.full(shape, rounds), 2.0)
