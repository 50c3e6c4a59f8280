"""Forecasts of learning curves hold the truth as often as they say."""

import numpy as np
import pytest

from draftsmith.decode.measurement.learning_curve import learning_curve

SIZES = np.array([1.0, 2.0, 4.0, 8.0]) * 1e4


@pytest.mark.parametrize(("exponent", "noise"), [(0.3, 0.05), (0.5, 0.2), (1.0, 0.02)])
def test_the_interval_of_a_forecast_holds_the_truth(exponent, noise):
    """60 rounds at 95 %, some prompts easier at all sizes: fewer than 50 hits have a probability of 2e-4."""
    hits, truth = 0, 2.6 - 0.8 * np.array([*SIZES, 16e4]) ** -exponent * 1e4**exponent
    for seed in range(60):
        rng = np.random.default_rng(seed)
        easier, luck = rng.normal(0, 0.1, 64), rng.normal(0, noise, (4, 64))
        rounds = 64 / truth[:4, None] * (1 + easier + luck)
        low, high = learning_curve(SIZES, np.full((4, 64), 64.0), rounds).forecasts[2.0].ci95
        hits += low <= truth[4] <= high
    assert hits >= 50
