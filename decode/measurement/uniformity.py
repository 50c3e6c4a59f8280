"""The probability transform of sampled tokens, tests of its uniformity and independence.

Shape suffixes: N tokens under test, V vocabulary.
"""

from dataclasses import dataclass

import torch
from scipy.stats import chi2_contingency, chisquare
from torch import Tensor

BINS = 50
PAIR_BINS = 10


@dataclass(frozen=True)
class ChiSquare:
    """One statistic."""

    statistic: float
    degrees_of_freedom: int
    p_value: float

    def __str__(self) -> str:
        return f"χ² = {self.statistic:.4g} of {self.degrees_of_freedom} degrees of freedom"


def transform(p_NV: Tensor, key_NV: Tensor, tokens_N: Tensor, places_N: Tensor) -> Tensor:
    """Return F(x⁻) + U p(x), (N,) float64, where F orders the vocabulary by a key, then by id.

    p and the key are (N, V), the tokens x are (N,) int64, and the places U, uniform on [0, 1), are (N,) float64.
    """
    x = tokens_N[:, None]
    at_x = key_NV.gather(1, x)
    before = (key_NV < at_x) | ((key_NV == at_x) & (torch.arange(p_NV.shape[1], device=p_NV.device) < x))
    below = torch.where(before, p_NV, 0.0).sum(-1, dtype=torch.float64)
    # p was computed in float32; the division makes the last step end at 1.
    return (below + places_N * p_NV.gather(1, x)[:, 0].double()) / p_NV.sum(-1, dtype=torch.float64)


def bins(u: Tensor, count: int) -> Tensor:
    """Return the bin of each number, of `count` equal parts of (0, 1)."""
    return (u * count).long().clamp(max=count - 1)


def uniformity(counts: Tensor) -> ChiSquare:
    """Test whether all bins are equally likely, given their counts."""
    test = chisquare(counts.numpy())
    return ChiSquare(float(test.statistic), len(counts) - 1, float(test.pvalue))


def independence(table: Tensor) -> ChiSquare:
    """Test whether rows and columns of a contingency table are independent."""
    # Empty rows and columns carry no information on independence; the test of uniformity sees them.
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    if min(table.shape) < 2:
        return ChiSquare(0.0, 0, 1.0)
    test = chi2_contingency(table.numpy(), correction=False)
    return ChiSquare(float(test.statistic), int(test.dof), float(test.pvalue))
