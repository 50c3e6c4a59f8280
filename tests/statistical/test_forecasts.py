"""Forecasts of learning curves hold the truth as often as they say."""

import numpy as np
import pytest

from draftsmith.decode.measurement.learning_curve import LUCK, forecast

SIZES = np.array([1.0, 2.0, 4.0, 8.0]) * 1e4


@pytest.mark.parametrize(("exponent", "noise"), [(0.3, 0.05), (0.5, 0.2), (1.0, 0.02)])
def test_the_interval_of_a_forecast_holds_the_truth(exponent, noise):
    """50 rounds at 95 %, some prompts easier, runs with luck: fewer than 42 hits have a probability of 2e-3.

    At ten times the text the least that is promised is 85 %: fewer than 36 hits have a probability of 5e-3.
    """
    ahead = np.array([2.0, 10.0])
    hits, truth = np.zeros(2), 2.6 - 0.8 * np.array([*SIZES, *(SIZES[-1] * ahead)]) ** -exponent * 1e4**exponent
    for seed in range(50):
        rng = np.random.default_rng(seed)
        easier, luck = rng.normal(0, 0.1, 64), rng.normal(0, noise, (4, 64))
        tau = truth + rng.normal(0, LUCK, 6)
        rounds = 64 / tau[:4, None] * (1 + easier + luck)
        low, high = np.array([forecast(SIZES, np.full((4, 64), 64.0), rounds, times).ci95 for times in ahead]).T
        hits += (low <= tau[4:]) & (tau[4:] <= high)
    assert hits[0] >= 42 and hits[1] >= 36
