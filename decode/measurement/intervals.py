"""Confidence intervals: resampled over prompts, because the tokens of one prompt are not independent.

Pooling tokens would overstate certainty about fourfold.

Expanded percentile bootstrap (Hesterberg 2015, "What Teachers Should Know About the Bootstrap"): in simulated rounds of
20 prompts its 95 % intervals of τ, α, speed-ups and gains held the truth in 94 %, plain percentiles and BCa in 92 %.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from scipy import stats

Interval = tuple[float, float]
RESAMPLES = 5000
LEAST = 5
"""Prompts that an interval needs. A resample holds nothing beyond what was seen: of two prompts "95 %" covers 48 %, of
three 75 %, of four 87 %, of five 94 %."""


@dataclass(frozen=True)
class Estimate:
    """A figure, and how certain it is."""

    value: float | None
    """None where it could not be measured."""
    ci95: Interval | None
    """Lower and upper end of the 95 % interval, resampled over prompts; None where there are too few."""
    n: int
    """How many prompts it is of, or batches where those were timed."""

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate times a number that is known."""
        if self.value is None or self.ci95 is None:
            return Estimate(None if self.value is None else self.value * factor, None, self.n)
        low, high = sorted(end * factor for end in self.ci95)
        return Estimate(self.value * factor, (low, high), self.n)

    def arms(self) -> Interval:
        """Return the lengths of an error bar below and above the value; 0 where a side has none."""
        if self.value is None or self.ci95 is None:
            return 0.0, 0.0
        # A percentile bootstrap's interval need not hold the value.
        return max(self.value - self.ci95[0], 0.0), max(self.ci95[1] - self.value, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as plain JSON types."""
        return asdict(self) | {"ci95": None if self.ci95 is None else list(self.ci95)}


def format_estimate(
    estimate: Estimate | None, form: str = ".2f", unit: str = "", spread: Literal["interval", "half", "none"] = "half"
) -> str:
    """Write an estimate; "–" where it is missing, the value alone where it has no interval.

    Args:
        estimate: what to write.
        form: format of the value and of the interval's ends.
        unit: what follows the value.
        spread: "interval" writes `1.23× [1.19, 1.27]`, "half" `1.23× ±0.04`, "none" `1.23×`.
    """
    if estimate is None or estimate.value is None:
        return "–"
    words = f"{estimate.value:{form}}{unit}"
    if estimate.ci95 is None or spread == "none":
        return words
    low, high = estimate.ci95
    if spread == "half":
        return f"{words} ±{(high - low) / 2:{form.lstrip('+')}}"
    return f"{words} [{low:{form}}, {high:{form}}]"


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Estimate Σ numerators ÷ Σ denominators over prompts.

    Args:
        numerators: one value a prompt.
        denominators: one value a prompt.

    Returns:
        The ratio with a percentile bootstrap over prompts. The interval is None where there are fewer than `LEAST`
        prompts, the value too where the denominators sum to nothing.
    """
    return _estimate(_ratio, numerators, denominators)


def ratio_difference(
    numerators: Sequence[float],
    denominators: Sequence[float],
    other_numerators: Sequence[float],
    other_denominators: Sequence[float],
) -> Estimate:
    """Estimate the difference of two such ratios, paired: each resample takes the same prompts for both."""
    return _estimate(_difference, numerators, denominators, other_numerators, other_denominators)


def rate_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    other_numerators: Sequence[float],
    other_denominators: Sequence[float],
) -> Estimate:
    """Estimate the ratio of two such ratios, paired: how many times the first rate is the second."""
    return _estimate(_quotient, numerators, denominators, other_numerators, other_denominators)


def difference_interval(*columns: Sequence[float], confidence: float) -> Interval | None:
    """Return the interval of `ratio_difference`, for the same arguments, at another confidence level."""
    return _interval(_difference, columns, confidence)


def rate_ratio_interval(*columns: Sequence[float], confidence: float) -> Interval | None:
    """Return the interval of `rate_ratio`, for the same arguments, at another confidence level."""
    return _interval(_quotient, columns, confidence)


def _ratio(n: Any, d: Any) -> Any:
    return n.sum(-1) / d.sum(-1)


def _difference(n: Any, d: Any, n2: Any, d2: Any) -> Any:
    return n.sum(-1) / d.sum(-1) - n2.sum(-1) / d2.sum(-1)


def _quotient(n: Any, d: Any, n2: Any, d2: Any) -> Any:
    return n.sum(-1) / d.sum(-1) * d2.sum(-1) / n2.sum(-1)


def _estimate(statistic: Callable[..., Any], *columns: Sequence[float]) -> Estimate:
    arrays = [np.asarray(values, dtype=np.float64) for values in columns]
    known = all(denominator.sum() for denominator in arrays[1::2])
    value = float(statistic(*arrays)) if known else None
    return Estimate(value, _interval(statistic, columns, 0.95), len(arrays[0]))


def _interval(statistic: Callable[..., Any], columns: Sequence[Sequence[float]], confidence: float) -> Interval | None:
    arrays = tuple(np.asarray(values, dtype=np.float64) for values in columns)
    if len(arrays[0]) < LEAST or not all(denominator.sum() for denominator in arrays[1::2]):
        return None
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
    bounds = float(interval.low), float(interval.high)
    return bounds if np.isfinite(bounds).all() else None


def _expanded(confidence: float, prompts: int) -> float:
    """Return the level whose percentiles cover as often as `confidence` says, for prompts are few.

    A resample varies (n − 1)/n as much as a sample, and t's tails are wider than the normal's.
    """
    t = stats.t.ppf((1 + confidence) / 2, prompts - 1)
    return float(2 * stats.norm.cdf(t * (prompts / (prompts - 1)) ** 0.5) - 1)
