"""Confidence intervals: resampled over prompts, because the tokens of one prompt are not independent.

Pooling tokens would overstate certainty about fourfold.

Expanded percentile bootstrap (Hesterberg 2015, "What Teachers Should Know About the Bootstrap"): in simulated rounds of
20 prompts its 95 % intervals of τ, α, speed-ups and gains held the truth in 94 %, plain percentiles and BCa in 92 %.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats

Estimate = dict[str, Any]
RESAMPLES = 5000


def ratio(numerators: Sequence[float], denominators: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Estimate Σ numerators ÷ Σ denominators over prompts.

    Args:
        numerators: one value a prompt.
        denominators: one value a prompt.
        confidence: level of the interval.

    Returns:
        `{"value": …, "ci95": [low, high]}` (named by the level): a percentile bootstrap over prompts. The interval is
        None where there are fewer than two prompts, the value too where the denominators sum to nothing. Of five
        prompts 95 % means about 91 %, for a resample holds nothing beyond what was seen.
    """
    return _estimate(lambda n, d: n.sum(-1) / d.sum(-1), (numerators, denominators), confidence)


def ratio_difference(
    numerators: Sequence[float],
    denominators: Sequence[float],
    other_numerators: Sequence[float],
    other_denominators: Sequence[float],
    confidence: float = 0.95,
) -> Estimate:
    """Estimate the difference of two such ratios, paired: each resample takes the same prompts for both."""

    def statistic(n: Any, d: Any, n2: Any, d2: Any) -> Any:
        return n.sum(-1) / d.sum(-1) - n2.sum(-1) / d2.sum(-1)

    return _estimate(statistic, (numerators, denominators, other_numerators, other_denominators), confidence)


def rate_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    other_numerators: Sequence[float],
    other_denominators: Sequence[float],
    confidence: float = 0.95,
) -> Estimate:
    """Estimate the ratio of two such ratios, paired: how many times the first rate is the second."""

    def statistic(n: Any, d: Any, n2: Any, d2: Any) -> Any:
        return n.sum(-1) / d.sum(-1) * d2.sum(-1) / n2.sum(-1)

    return _estimate(statistic, (numerators, denominators, other_numerators, other_denominators), confidence)


def _estimate(statistic: Callable[..., Any], data: tuple[Sequence[float], ...], confidence: float) -> Estimate:
    arrays = tuple(np.asarray(values, dtype=np.float64) for values in data)
    key = f"ci{confidence * 100:g}"
    if not all(denominator.sum() for denominator in arrays[1::2]):
        return {"value": None, key: None}
    value = float(statistic(*arrays))
    if len(arrays[0]) < 2:
        return {"value": value, key: None}
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # told by the missing interval
        interval = stats.bootstrap(
            arrays,
            lambda *resampled, axis: statistic(*resampled),
            paired=True,
            vectorized=True,
            n_resamples=RESAMPLES,
            confidence_level=_expanded(confidence, len(arrays[0])),
            method="percentile",
            rng=np.random.default_rng(0),
        ).confidence_interval
    bounds = [float(interval.low), float(interval.high)]
    return {"value": value, key: bounds if np.isfinite(bounds).all() else None}


def _expanded(confidence: float, prompts: int) -> float:
    """Return the level whose percentiles cover as often as `confidence` says, for prompts are few.

    A resample varies (n − 1)/n as much as a sample, and t's tails are wider than the normal's.
    """
    t = stats.t.ppf((1 + confidence) / 2, prompts - 1)
    return float(2 * stats.norm.cdf(t * (prompts / (prompts - 1)) ** 0.5) - 1)
