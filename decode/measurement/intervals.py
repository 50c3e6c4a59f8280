"""Confidence intervals: resampled over prompts, because the tokens of one prompt are not independent.

Pooling tokens would overstate certainty about fourfold. 95 % intervals are the expanded percentile bootstrap of
Hesterberg (2015, "What Teachers Should Know About the Bootstrap"). In simulated rounds of 20 prompts they held the true
τ, α, speed-up and gain in 94 % of cases, plain percentiles and BCa in 92 %.

Other levels need tails, which a bootstrap of 16 prompts does not have. Gates and alarms use `ratio_interval`,
`difference_interval` and `product_interval`: Student's t with the jackknife's standard error (Tukey 1958; Efron and
Tibshirani 1993, chapter 11). docs/benchmarks.md has simulations of their coverage.

All estimates of n prompts share one resampling, so that many are one matrix product, and equal data give equal
intervals. Where only the first prompts have a column's value, they and the others are resampled apart (strata: Efron
and Tibshirani, section 8.4). Shapes: R resamples, n prompts, M estimates, C columns.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
"""The weights held as floating-point numbers at a time: 32 MiB."""
LEAST = 5
"""The prompts that an interval needs: with two prompts "95 %" covers 48 %, with three 75 %, four 87 %, five 94 %."""


@dataclass(frozen=True)
class Estimate:
    """A figure and its uncertainty."""

    value: float | None
    """None where it could not be measured."""
    ci95: Interval | None
    """The ends of the 95 % interval, resampled over prompts; None where there are too few."""
    n: int
    """The number of prompts, or of batches where batches were timed."""

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
    """Format an estimate; "–" where it is missing, the value alone where it has no interval.

    The spread "interval" gives `1.23× [1.19, 1.27]`, "half" `1.23× ±0.04`, "none" `1.23×`.
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
    """Estimate Σ numerators ÷ Σ denominators, with one of each for each prompt.

    The interval is None for fewer than `LEAST` prompts, the value where the denominators sum to zero.
    """
    return _estimates(_ratio, [numerators], [denominators])[0]


def ratios(columns: Mapping[Key, tuple[Sequence[float], Sequence[float]]]) -> dict[Key, Estimate]:
    """Estimate many ratios over the same prompts at once; see `ratio`."""
    if not columns:
        return {}
    return dict(zip(columns, _estimates(_ratio, *zip(*columns.values(), strict=True)), strict=True))


def ratio_difference(*columns: Sequence[float]) -> Estimate:
    """Estimate Σn ÷ Σd − Σn2 ÷ Σd2 from columns n, d, n2, d2, paired: each resample takes the same prompts for both."""
    return _estimates(_difference, *([column] for column in columns))[0]


def ratio_product(*columns: Sequence[float]) -> Estimate:
    """Estimate Π Σn ÷ Σd over the pairs of columns n, d, n2, d2, …, resampled together.

    A speed-up is the tokens per second of two ways to decode the same prompts: `tokens, seconds, plain_seconds,
    plain_tokens`. A column may hold only the first prompts; the estimate's `n` is the length of the shortest.
    """
    first = min(map(len, columns))
    return replace(_estimates(_product, *([column] for column in padded(columns)), first=first)[0], n=first)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], confidence: float) -> Interval | None:
    """Return the interval of `ratio` at any confidence level, by Student's t."""
    return _students(_ratio, numerators, denominators, confidence=confidence)


def difference_interval(*columns: Sequence[float], confidence: float) -> Interval | None:
    """Return the interval of `ratio_difference` at any confidence level, by Student's t."""
    return _students(_difference, *columns, confidence=confidence)


def product_interval(*columns: Sequence[float], confidence: float) -> Interval | None:
    """Return the interval of `ratio_product` at any confidence level, by Student's t of its logarithm."""
    first = min(map(len, columns))
    ends = _students(lambda *sums: np.log(_product(*sums)), *padded(columns), confidence=confidence, first=first)
    return None if ends is None else (float(np.exp(ends[0])), float(np.exp(ends[1])))


def confidence_of_each(confidence: float, count: int) -> float:
    """Return the level at which `count` intervals, however dependent, all hold with `confidence` (Bonferroni)."""
    return 1 - (1 - confidence) / max(count, 1)


def padded(columns: Sequence[Sequence[float]]) -> list[Values]:
    """Return the columns with zeros for the prompts that they lack."""
    longest = max(map(len, columns))
    return [np.pad(np.asarray(column, np.float64), (0, longest - len(column))) for column in columns]


def _students(
    statistic: Callable[..., Values], *columns: ArrayLike, confidence: float, first: int | None = None
) -> Interval | None:
    """Return Student's interval of a statistic of sums over n prompts; None where they, or the `first`, are too few."""
    values_Cn = np.asarray(columns, dtype=np.float64)
    prompts, sums_C = values_Cn.shape[1] if first is None else first, values_Cn.sum(1)
    if prompts < LEAST:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        value = statistic(*sums_C)
        # The jackknife: the statistic without each prompt in turn, stratum by stratum.
        without_n = statistic(*(sums_C[:, None] - values_Cn))
        parts = [part for part in np.split(without_n, [prompts]) if len(part)]
        error = np.sqrt(sum((len(part) - 1) * np.var(part) for part in parts))
    half = float(stats.t.ppf((1 + confidence) / 2, prompts - 1) * error)
    ends = float(value) - half, float(value) + half
    return ends if np.isfinite(ends).all() else None


def _ratio(n: Values, d: Values) -> Values:
    return n / d


def _difference(n: Values, d: Values, n2: Values, d2: Values) -> Values:
    return n / d - n2 / d2


def _product(*sums: Values) -> Values:
    return np.prod([n / d for n, d in zip(sums[::2], sums[1::2], strict=True)], axis=0)


def _estimates(statistic: Callable[..., Values], *columns: ArrayLike, first: int | None = None) -> list[Estimate]:
    """Estimate M statistics of sums over n prompts; each column is (M, n), and the `first` prompts a stratum."""
    arrays = [np.asarray(values, dtype=np.float64) for values in columns]
    count, prompts = arrays[0].shape
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(*(rows.sum(-1) for rows in arrays))
    bounds = _bounds(statistic, arrays, count, prompts if first is None else first)
    defined = np.all([rows.sum(-1) for rows in arrays[1::2]], axis=0)  # no denominator is zero
    return [
        _estimate(value, low, high, prompts) if is_defined else Estimate(None, None, prompts)
        for value, low, high, is_defined in zip(values, *bounds, defined, strict=True)
    ]


def _bounds(statistic: Callable[..., Values], arrays: Sequence[Values], count: int, first: int) -> Values:
    """Return the ends of `count` 95 % intervals, (2, count); NaN where there are too few prompts."""
    if first < LEAST:
        return np.full((2, count), np.nan)
    tail = 50 * (1 - _expanded(0.95, first))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.percentile(statistic(*_resampled_sums(arrays, first)), [tail, 100 - tail], axis=0)


def _estimate(value: float, low: float, high: float, prompts: int) -> Estimate:
    ends = (float(low), float(high)) if np.isfinite([low, high]).all() else None
    return Estimate(float(value), ends, prompts)


def _resampled_sums(arrays: Sequence[Values], first: int) -> list[Values]:
    """Return, for each array (M, n), the sums over the prompts of each resample of both strata, (R, M)."""
    strata = [slice(0, first), slice(first, None)][: 1 + (first < arrays[0].shape[1])]
    totals = [np.zeros((RESAMPLES, len(rows))) for rows in arrays]
    for seed, stratum in enumerate(strata):
        weights = _weights(arrays[0][:, stratum].shape[1], RESAMPLES, seed)
        places = np.array_split(np.arange(RESAMPLES), -(-weights.size // AT_A_TIME))
        for block in places:
            floats = weights[block].astype(np.float64)
            # One product an array, so that equal arrays have bit-identical sums.
            for total, rows in zip(totals, arrays, strict=True):
                total[block] += floats @ rows[:, stratum].T
    return totals


@lru_cache(maxsize=8)  # of prompts × 5,000 bytes each; a report has groups of several sizes
def _weights(prompts: int, resamples: int, seed: int) -> NDArray[np.uint8]:
    """Return the multiplicity of each prompt in each resample, (R, n)."""
    rng = np.random.default_rng(seed)
    chosen = (rng.integers(0, prompts, prompts) for _ in range(resamples))
    return np.array([np.bincount(places, minlength=prompts) for places in chosen], dtype=np.uint8)


def _expanded(confidence: float, prompts: int) -> float:
    """Return the level whose percentiles reach `confidence` with few prompts.

    The variance of resamples is (n − 1)/n of that of samples, and t's tails are wider than the normal's.
    """
    t = stats.t.ppf((1 + confidence) / 2, prompts - 1)
    return float(2 * stats.norm.cdf(t * (prompts / (prompts - 1)) ** 0.5) - 1)
