"""Confidence intervals: resampled over prompts, because the tokens of one prompt are not independent.

Pooling tokens would overstate certainty about fourfold.

Expanded percentile bootstrap (Hesterberg 2015, "What Teachers Should Know About the Bootstrap"): in simulated rounds of
20 prompts its 95 % intervals of τ, α, speed-ups and gains held the truth in 94 %, plain percentiles and BCa in 92 %.

At other levels than 95 % the tails matter, and a bootstrap of 16 prompts has none at 0.1 %: `ratio_interval`,
`difference_interval` and `rate_ratio_interval`, which gates and alarms rest on, are Student's, with the jackknife's
standard error (Tukey 1958; Efron and Tibshirani 1993, chapter 11). How often they are right:
docs/benchmarks.md has the simulation.

All estimates of n prompts share one resampling, so that many of them are one matrix product, and paired ones are equal
where their data are. Shapes: R resamples, n prompts, M estimates, C columns.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Interval = tuple[float, float]
Values = NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)
RESAMPLES = 5000
AT_A_TIME = 2**22
"""Weights that are held as floating-point numbers at a time: 32 MiB."""
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
    """The number of prompts, or of batches where those were timed."""

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate times an exact number."""
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
    return _estimates(_ratio, [numerators], [denominators])[0]


def ratios(columns: Mapping[Key, tuple[Sequence[float], Sequence[float]]]) -> dict[Key, Estimate]:
    """Estimate many ratios over the same prompts at once, from the numerators and denominators of each; see `ratio`."""
    if not columns:
        return {}
    return dict(zip(columns, _estimates(_ratio, *zip(*columns.values(), strict=True)), strict=True))


def ratio_difference(
    numerators: Sequence[float],
    denominators: Sequence[float],
    other_numerators: Sequence[float],
    other_denominators: Sequence[float],
) -> Estimate:
    """Estimate the difference of two such ratios, paired: each resample takes the same prompts for both."""
    return _estimates(_difference, [numerators], [denominators], [other_numerators], [other_denominators])[0]


def rate_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    other_numerators: Sequence[float],
    other_denominators: Sequence[float],
) -> Estimate:
    """Estimate the ratio of two such ratios, paired: how many times the first rate is the second."""
    return _estimates(_quotient, [numerators], [denominators], [other_numerators], [other_denominators])[0]


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], confidence: float) -> Interval | None:
    """Return the interval of `ratio` at any confidence level, by Student's t."""
    return _students(_ratio, numerators, denominators, confidence=confidence)


def difference_interval(*columns: Sequence[float], confidence: float) -> Interval | None:
    """Return the interval of `ratio_difference`, for the same arguments, at any confidence level, by Student's t."""
    return _students(_difference, *columns, confidence=confidence)


def rate_ratio_interval(*columns: Sequence[float], confidence: float) -> Interval | None:
    """Return the interval of `rate_ratio`, for the same arguments, at any confidence level.

    It is Student's of the logarithm, which is as far from its ends on either side.
    """

    def logarithm(n: Values, d: Values, n2: Values, d2: Values) -> Values:
        return np.log(_quotient(n, d, n2, d2))

    found = _students(logarithm, *columns, confidence=confidence)
    return None if found is None else (float(np.exp(found[0])), float(np.exp(found[1])))


def confidence_of_each(confidence: float, count: int) -> float:
    """Return the level at which `count` intervals all hold the truth with `confidence`, however they depend.

    Bonferroni's: each may fail in an equal part of the cases in which one of them may.
    """
    return 1 - (1 - confidence) / max(count, 1)


def _students(statistic: Callable[..., Values], *columns: Sequence[float], confidence: float) -> Interval | None:
    """Return Student's interval of a statistic of sums over n prompts; None where they are too few.

    Its standard error is that of the values without each prompt in turn.
    """
    values_Cn = np.asarray(columns, dtype=np.float64)
    prompts, sums_C = values_Cn.shape[1], values_Cn.sum(1)
    if prompts < LEAST:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        value = statistic(*sums_C)
        left_n = statistic(*(sums_C[:, None] - values_Cn))
        error = np.sqrt((prompts - 1) * np.var(left_n))
    half = float(stats.t.ppf((1 + confidence) / 2, prompts - 1) * error)
    ends = float(value) - half, float(value) + half
    return ends if np.isfinite(ends).all() else None


def _ratio(n: Values, d: Values) -> Values:
    return n / d


def _difference(n: Values, d: Values, n2: Values, d2: Values) -> Values:
    return n / d - n2 / d2


def _quotient(n: Values, d: Values, n2: Values, d2: Values) -> Values:
    return n / d * d2 / n2


def _estimates(statistic: Callable[..., Values], *columns: ArrayLike) -> list[Estimate]:
    """Estimate M statistics of sums over n prompts, of which each column holds M rows of n values."""
    arrays = [np.asarray(values, dtype=np.float64) for values in columns]
    count, prompts = arrays[0].shape
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(*(rows.sum(-1) for rows in arrays))
    bounds = _bounds(statistic, arrays, count)
    defined = np.all([rows.sum(-1) for rows in arrays[1::2]], axis=0)
    return [
        _estimate(value, low, high, prompts) if is_defined else Estimate(None, None, prompts)
        for value, low, high, is_defined in zip(values, *bounds, defined, strict=True)
    ]


def _bounds(statistic: Callable[..., Values], arrays: Sequence[Values], count: int) -> Values:
    """Return the lower and upper ends of `count` figures' 95 % intervals, (2, count); NaN where prompts are too few."""
    prompts = arrays[0].shape[1]
    if prompts < LEAST:
        return np.full((2, count), np.nan)
    tail = 50 * (1 - _expanded(0.95, prompts))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.percentile(statistic(*_resampled_sums(arrays)), [tail, 100 - tail], axis=0)


def _estimate(value: float, low: float, high: float, prompts: int) -> Estimate:
    ends = (float(low), float(high)) if np.isfinite([low, high]).all() else None
    return Estimate(float(value), ends, prompts)


def _resampled_sums(arrays: Sequence[Values]) -> list[Values]:
    """Return the sums of each array's rows, (M, n), over the prompts of each resample, (R, M)."""
    weights = _weights(arrays[0].shape[1], RESAMPLES)
    sums: list[list[Values]] = []
    for block in np.array_split(weights, -(-weights.size // AT_A_TIME)):
        floats = block.astype(np.float64)
        # A product for each array: equal ones have equal sums then, to the last bit.
        sums.append([floats @ rows.T for rows in arrays])
    return [np.concatenate(blocks) for blocks in zip(*sums, strict=True)]


@lru_cache(maxsize=8)
def _weights(prompts: int, resamples: int) -> NDArray[np.uint8]:
    """Return how often each resample holds each prompt, (R, n)."""
    rng = np.random.default_rng(0)
    chosen = (rng.integers(0, prompts, prompts) for _ in range(resamples))
    return np.array([np.bincount(places, minlength=prompts) for places in chosen], dtype=np.uint8)


def _expanded(confidence: float, prompts: int) -> float:
    """Return the level whose percentiles cover as often as `confidence` says, for prompts are few.

    A resample varies (n − 1)/n as much as a sample, and t's tails are wider than the normal's.
    """
    t = stats.t.ppf((1 + confidence) / 2, prompts - 1)
    return float(2 * stats.norm.cdf(t * (prompts / (prompts - 1)) ** 0.5) - 1)
