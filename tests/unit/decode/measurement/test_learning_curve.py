"""The curve of τ over the text: its three numbers are found again, and its intervals hold the truth."""

import numpy as np
import pytest

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import ratio
from draftsmith.decode.measurement.learning_curve import learning_curve

SIZES = np.array([1.0, 2.0, 4.0, 8.0]) * 1e4
TOKENS = 64.0


def truth(size: np.ndarray | float) -> np.ndarray:
    return 2.6 - 0.8 * (size / 1e4) ** -0.5


def replayed(taus, prompts=64, seed=0, noise=0.05):
    """Each prompt's tokens and rounds: some prompts are easier at all sizes, and each has its own luck at each."""
    rng = np.random.default_rng(seed)
    easier, luck = rng.normal(0, 0.1, prompts), rng.normal(0, noise, (len(taus), prompts))
    return np.full((len(taus), prompts), TOKENS), TOKENS / np.asarray(taus)[:, None] * (1 + easier + luck)


def test_a_curve_without_noise_is_found_again():
    rounds = np.repeat(TOKENS / truth(SIZES)[:, None], 6, axis=1)
    curve = learning_curve(SIZES[::-1], np.full((4, 6), TOKENS), rounds[::-1], [2, 16], luck=1e-5)  # in any order
    assert curve.sizes == SIZES.tolist() and curve.grows and curve.residual < 1e-3
    assert curve.exponent.value == pytest.approx(0.5, abs=0.01) and curve.limit.value == pytest.approx(2.6, abs=0.02)
    assert curve.forecasts[2.0].value == pytest.approx(truth(16e4), abs=1e-3)
    assert curve.forecasts[16.0].value == pytest.approx(truth(128e4), abs=0.01)
    # All prompts are alike, and all runs: there is nothing that could have been otherwise.
    assert curve.forecasts[2.0].ci95 == pytest.approx((curve.forecasts[2.0].value,) * 2, abs=2e-3)


def test_the_luck_of_runs_widens_a_forecast_and_hides_the_limit():
    """Without any noise among prompts: how sure is told by what is known of runs."""
    rounds = np.repeat(TOKENS / truth(SIZES)[:, None], 6, axis=1)
    sure, unsure = (learning_curve(SIZES, np.full((4, 6), TOKENS), rounds, [2, 10], luck=x) for x in (0.001, 0.05))
    for times in (2.0, 10.0):
        widths = [np.diff(curve.forecasts[times].ci95)[0] for curve in (sure, unsure)]
        assert widths[0] < 0.1 and widths[1] > 4 * 0.05 * 0.75
    assert sure.limit.value == pytest.approx(2.6, abs=0.05)
    assert unsure.limit.value is None  # a logarithm passes as near
    # What misses the curve by more than was known says that luck is greater.
    off = TOKENS / (truth(SIZES) + np.array([0.2, -0.2, 0.2, -0.2]))[:, None]
    missed = learning_curve(SIZES, np.full((4, 6), TOKENS), np.repeat(off, 6, axis=1), [2])
    assert missed.luck > 1.5 * unsure.luck


def test_three_amounts_give_no_interval():
    """A curve of three numbers passes through them, and so says nothing of how far it is off."""
    curve = learning_curve(SIZES[:3], *replayed(truth(SIZES[:3])))
    assert curve.residual is None and curve.forecasts[2.0].ci95 is None
    assert curve.forecasts[2.0].value == pytest.approx(truth(8e4), abs=0.1)


def test_the_residual_is_of_the_amounts_that_are_left():
    """Of four amounts and three numbers one is left, so that the squares are not divided by four."""
    taus = truth(SIZES) + np.array([0.02, -0.02, 0.02, -0.02])
    curve = learning_curve(SIZES, *replayed(taus, noise=0.0))
    assert 0.02 < curve.residual < 0.05


def test_a_forecast_is_no_more_than_can_be_drafted():
    curve = learning_curve(SIZES, *replayed([1.2, 1.5, 1.8, 2.1]), [10], most=2.5)
    assert curve.forecasts[10.0].value <= 2.5 and curve.forecasts[10.0].ci95[1] == 2.5


def test_its_points_are_the_replays_own():
    tokens, rounds = replayed(truth(SIZES))
    curve = learning_curve(SIZES, tokens, rounds)
    assert curve.lengths == [ratio(list(t), list(r)) for t, r in zip(tokens, rounds, strict=True)]
    assert curve.lengths[-1].value < curve.forecasts[2.0].value


def test_more_prompts_make_the_forecast_more_certain():
    widths = [
        np.diff(learning_curve(SIZES, *replayed(truth(SIZES), prompts=n), luck=1e-3).forecasts[2.0].ci95)[0]
        for n in (16, 256)
    ]
    assert widths[1] < 0.5 * widths[0]


def test_text_that_brings_nothing_is_a_flat_curve():
    tokens, rounds = replayed([2.2, 2.1, 2.0, 1.9], noise=0.001)
    curve = learning_curve(SIZES, tokens, rounds)
    mean = np.mean([length.value for length in curve.lengths])
    assert not curve.grows and curve.forecasts[2.0].value == curve.limit.value == pytest.approx(mean)
    assert curve.residual > 0.1


def test_what_grows_as_the_logarithm_goes_on_so():
    """No limit is in sight: the forecast may not make one up."""
    curve = learning_curve(SIZES, *replayed([1.2, 1.5, 1.8, 2.1], noise=0.001), [2, 4], luck=1e-4)
    assert curve.limit.value is None
    slope = (curve.lengths[-1].value - curve.lengths[0].value) / 3
    for times, doublings in ((2.0, 1), (4.0, 2)):
        assert curve.forecasts[times].value == pytest.approx(curve.lengths[-1].value + doublings * slope, abs=0.02)


def test_few_prompts_give_no_interval():
    curve = learning_curve(SIZES, *replayed(truth(SIZES), prompts=3))
    assert curve.forecasts[2.0].value is not None and curve.forecasts[2.0].ci95 is None


@pytest.mark.parametrize(
    ("sizes", "shape", "message"),
    [
        ([1.0, 2.0], (2, 4), "sizes: expected at least 3 different amounts of text above 0, found 1, 2"),
        ([], (0, 4), "sizes: expected at least 3 different amounts of text above 0, found none"),
        ([1.0, 2.0, 2.0], (3, 4), "sizes: expected at least 3 different"),
        ([0.0, 1.0, 2.0], (3, 4), "sizes: expected at least 3 different"),
        ([1.0, 2.0, 4.0], (2, 4), r"tokens: expected one number for each of 3 amounts and prompt, found \(2, 4\)"),
        ([1.0, 2.0, 4.0], (3, 0), "tokens: expected one number for each of 3"),
    ],
)
def test_what_makes_no_curve_is_refused(sizes, shape, message):
    with pytest.raises(InputError, match=message):
        learning_curve(sizes, np.ones(shape), np.ones(shape))


def test_a_drafter_without_rounds_is_refused():
    with pytest.raises(InputError, match="rounds: expected some for each amount, found none"):
        learning_curve(SIZES, np.ones((4, 5)), np.zeros((4, 5)))
