"""How τ grows with the text that is learned from: a saturating curve through a few amounts, and what more would bring.

τ(n) = τ∞ − c·n^(−b), the power law with a limit that the error of models follows (Hestness et al. 2017, section 2). For
each b on a grid τ∞ and c are a straight line's, so that the least squares are found at once for all resamples.

Shape suffixes: K amounts of text, n prompts, R resamples, G exponents.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import Estimate, Values, figures, ratio

EXPONENTS = np.geomspace(0.01, 2.0, 150)
"""b: at the least τ grows as the logarithm of n; at the most all but the first amount are near the limit."""
LEAST = 3
"""Amounts of text that a curve of three numbers needs."""


@dataclass(frozen=True)
class LearningCurve:
    """τ against the text that was learned from. The intervals are over prompts: they don't hold the luck of a run."""

    sizes: list[float]
    """Tokens learned from, ascending."""
    lengths: list[Estimate]
    """τ of each."""
    limit: Estimate
    """τ∞."""
    exponent: Estimate
    """b."""
    residual: float
    """The root mean square of τ minus the curve: with what the intervals hold, the luck of the runs."""
    grows: bool
    """Whether τ rises with the text at all. If not, the curve is flat, and no more text is called for."""
    forecasts: dict[float, Estimate]
    """τ by times the largest amount."""


def learning_curve(
    sizes: Sequence[float], tokens: ArrayLike, rounds: ArrayLike, times: Sequence[float] = (2.0,)
) -> LearningCurve:
    """Fit τ(n) = τ∞ − c·n^(−b), c ≥ 0, and forecast τ for more text.

    Args:
        sizes: tokens that were learned from, K different numbers.
        tokens: of each replayed prompt, by what was learned from each amount, (K, n).
        rounds: likewise, expected rounds; τ is Σ tokens ÷ Σ rounds.
        times: multiples of the largest amount to forecast.

    Raises:
        InputError: fewer than three amounts, one twice or none above 0, or tables that do not fit.
    """
    order = np.argsort(sizes)
    n_K = np.asarray(sizes, dtype=np.float64)[order]
    if len(n_K) < LEAST or not (n_K > 0).all() or not (np.diff(n_K) > 0).all():
        found = ", ".join(f"{size:g}" for size in n_K) or "none"
        raise InputError(f"sizes: expected at least {LEAST} different amounts of text above 0, found {found}")
    tables = [np.asarray(table, dtype=np.float64) for table in (tokens, rounds)]
    for name, table in zip(("tokens", "rounds"), tables, strict=True):
        if table.ndim != 2 or len(table) != len(n_K) or table.shape != tables[0].shape or not table.shape[1]:
            raise InputError(
                f"{name}: expected one number for each of {len(n_K)} amounts and prompt, found {table.shape}"
            )
    tokens_Kn, rounds_Kn = (table[order] for table in tables)
    if not (rounds_Kn.sum(1) > 0).all():
        raise InputError("rounds: expected some for each amount, found none")
    ahead = np.asarray([1.0, *times])

    def fitted(tokens_RK: Values, rounds_RK: Values) -> Values:
        """Return τ∞, b and the curve at multiples of the largest amount, (R, 2 + 1 + times)."""
        limit_R, slope_R, b_R = _fit(n_K / n_K[-1], tokens_RK / rounds_RK)
        curve = limit_R[:, None] - slope_R[:, None] * ahead ** -b_R[:, None]
        return np.column_stack([limit_R, b_R, curve])

    limit, exponent, _, *forecasts = figures(fitted, tokens_Kn, rounds_Kn)
    tau_K = tokens_Kn.sum(1) / rounds_Kn.sum(1)
    (level,), (slope,), (b,) = _fit(n_K / n_K[-1], tau_K[None])
    left_K = tau_K - (level - slope * (n_K / n_K[-1]) ** -b)
    return LearningCurve(
        n_K.tolist(),
        [ratio(t, r) for t, r in zip(tokens_Kn.tolist(), rounds_Kn.tolist(), strict=True)],
        limit,
        exponent,
        float(np.sqrt((left_K**2).mean())),
        bool(slope > 0),
        dict(zip(map(float, times), forecasts, strict=True)),
    )


def _fit(n_K: Values, tau_RK: Values) -> tuple[Values, Values, Values]:
    """Return τ∞, c and b of each row by least squares, (R,) each; c = 0 where τ does not rise."""
    x_GK = n_K ** -EXPONENTS[:, None]
    x_GK, mean_G = x_GK - x_GK.mean(1, keepdims=True), x_GK.mean(1)
    mean_R = tau_RK.mean(1)
    # τ falls by c where n^(−b) rises by 1, and the line passes through both means.
    c_RG = np.maximum(-(tau_RK - mean_R[:, None]) @ x_GK.T / (x_GK**2).sum(1), 0.0)
    explained_RG = c_RG**2 * (x_GK**2).sum(1)
    best_R = explained_RG.argmax(1)
    c_R = np.take_along_axis(c_RG, best_R[:, None], 1)[:, 0]
    return mean_R + c_R * mean_G[best_R], c_R, EXPONENTS[best_R]
