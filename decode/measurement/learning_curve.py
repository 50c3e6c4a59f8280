"""Learning curves: τ against the amount of training text, by a saturating curve through a few amounts.

τ(n) = τ∞ − c·n^(−b), the power law with a limit that the error of models follows (Hestness et al. 2017, section 2).

Many curves pass near a few points, so all curves are weighed by their posterior probability. The noise has two parts:
other prompts, with the jackknife's covariance, and luck, by which τ differs between training runs with other seeds. The
priors are flat on τ at the least and the greatest amount, with τ not falling between them, and on the logarithm of b.
The variance of luck has a scaled inverse chi-square prior with few degrees of freedom, so that points far from the
curve raise it.

Shape suffixes: K amounts of text, n prompts, G exponents, L sizes of luck, R draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_ndtr, ndtr, ndtri

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import LEAST as LEAST_PROMPTS
from draftsmith.decode.measurement.intervals import Estimate, Values

EXPONENTS = np.geomspace(0.01, 2.0, 150)
"""The grid of b: at the smallest τ grows as log n; at the largest all but the first amount are near the limit."""
NUMBERS = 3  # the numbers of a curve: it passes through as many amounts, which says nothing of how far it is off
LUCK = 0.05  # the standard deviation of τ over seeds: the largest at T=0 with three seeds on the embedded target
LUCKS = np.geomspace(0.25, 8.0, 12)  # the grid of luck, as multiples of its prior value
FREEDOM = 4  # the degrees of freedom of that prior, under which a half or twice the luck is no surprise
DRAWS = 20_000


def forecast(
    sizes: Sequence[float], tokens: ArrayLike, rounds: ArrayLike, times: float, luck: float = LUCK
) -> Estimate:
    """Weigh the curves τ(n) = τ∞ − c·n^(−b), c ≥ 0, and forecast τ at `times` the largest amount of text.

    The forecast is of one more run, its luck and other prompts included; it has no interval for 3 amounts. `sizes` are
    K amounts in tokens, at least 2; `tokens` and expected `rounds` are those of each replayed prompt under the run of
    each amount, (K, n), and τ = Σ tokens ÷ Σ rounds. `luck` is the prior standard deviation of τ over seeds.
    """
    order = np.argsort(sizes)
    n_K = np.asarray(sizes, dtype=np.float64)[order]
    if not (n_K > 0).all() or not (np.diff(n_K) > 0).all():
        raise InputError(f"sizes: expected different amounts of text above 0, found {', '.join(map(str, sizes))}")
    tokens_Kn, rounds_Kn = (np.asarray(table, dtype=np.float64)[order] for table in (tokens, rounds))
    if not (rounds_Kn.sum(1) > 0).all():
        raise InputError("rounds: expected some for each amount, found none")
    prompts, tau_K = tokens_Kn.shape[1], tokens_Kn.sum(1) / rounds_Kn.sum(1)
    x_K = n_K / n_K[-1]
    curves = _draw_curves(x_K, tau_K, _covariance(tokens_Kn, rounds_Kn), luck)
    chance_R = np.random.default_rng(1).standard_normal(DRAWS) * curves.luck_R
    low, middle, high = (float(end) for end in np.quantile(curves.at(times) + chance_R, [0.025, 0.5, 0.975]))
    value = middle if _rises(x_K, tau_K) else float(tau_K.mean())
    has_interval = prompts >= LEAST_PROMPTS and len(n_K) > NUMBERS
    return Estimate(value, (min(low, value), max(high, value)) if has_interval else None, prompts)


@dataclass(frozen=True)
class _Curves:
    """R curves drawn from the posterior."""

    least: float  # the least amount ÷ the greatest
    first_R: Values  # τ at the least amount
    rise_R: Values  # τ at the greatest amount less τ at the least
    exponent_R: Values
    luck_R: Values

    def at(self, times: float) -> Values:
        """Return τ at `times` the greatest amount, (R,)."""
        return self.first_R + self.rise_R * _risen(self.least, self.exponent_R, times)


def _risen(least: float, b: Values, times: float | Values) -> Values:
    """Return the share of the rise from the least to the greatest amount (0 to 1 between them) at an amount."""
    risen: Values = (least**-b - np.power(times, -b)) / (least**-b - 1)
    return risen


def _draw_curves(x_K: Values, tau_K: Values, prompts_KK: Values, luck: float) -> _Curves:
    """Draw curves from the posterior, exactly on a grid of exponents and sizes of luck."""
    # Given b and the luck, τ is linear in its value at the least amount and its rise: a regression with known noise,
    # whose posterior is normal, truncated to rises above 0.
    design_GK2 = np.ones((len(EXPONENTS), len(x_K), 2))
    design_GK2[:, :, 1] = _risen(x_K[0], EXPONENTS[:, None], x_K)
    lucks_L = luck * LUCKS
    inverse_LKK = np.linalg.inv(prompts_KK + lucks_L[:, None, None] ** 2 * np.eye(len(x_K)))
    weighted_GL2K = np.swapaxes(design_GK2, 1, 2)[:, None] @ inverse_LKK
    precision_GL22 = weighted_GL2K @ design_GK2[:, None]
    covariance_GL22 = np.linalg.inv(precision_GL22)
    mean_GL2 = (covariance_GL22 @ (weighted_GL2K @ tau_K)[..., None])[..., 0]
    residual_GLK = tau_K - (design_GK2[:, None] @ mean_GL2[..., None])[..., 0]
    misfit_GL = np.einsum("glk,lkj,glj->gl", residual_GLK, inverse_LKK, residual_GLK)
    deviation_GL = np.sqrt(covariance_GL22[..., 1, 1])
    # The marginal likelihood of each grid point, times the probability of a positive rise and the prior of the luck.
    log_GL = 0.5 * (np.linalg.slogdet(inverse_LKK)[1] - np.linalg.slogdet(precision_GL22)[1] - misfit_GL)
    log_GL += log_ndtr(mean_GL2[..., 1] / deviation_GL)
    log_GL -= FREEDOM * (np.log(lucks_L) + 0.5 * (luck / lucks_L) ** 2)
    weights_GL = np.exp(log_GL - log_GL.max())

    generator = np.random.default_rng(0)
    g_R, l_R = np.divmod(
        generator.choice(weights_GL.size, DRAWS, p=weights_GL.ravel() / weights_GL.sum()), len(lucks_L)
    )
    mean_R2, covariance_R22, deviation_R = mean_GL2[g_R, l_R], covariance_GL22[g_R, l_R], deviation_GL[g_R, l_R]
    # The rise by inversion of the truncated normal, then the first τ by its conditional normal.
    below_R = ndtr(-mean_R2[:, 1] / deviation_R)
    uniform_R = np.clip(below_R + (1 - below_R) * generator.random(DRAWS), 1e-300, 1 - 1e-16)
    rise_R = np.maximum(mean_R2[:, 1] + deviation_R * ndtri(uniform_R), 0.0)
    lean_R = covariance_R22[:, 0, 1] / deviation_R**2
    rest_R = np.sqrt(np.maximum(covariance_R22[:, 0, 0] - lean_R * covariance_R22[:, 0, 1], 0.0))
    first_R = mean_R2[:, 0] + lean_R * (rise_R - mean_R2[:, 1]) + rest_R * generator.standard_normal(DRAWS)
    return _Curves(float(x_K[0]), first_R, rise_R, EXPONENTS[g_R], lucks_L[l_R])


def _covariance(tokens_Kn: Values, rounds_Kn: Values) -> Values:
    """Return the covariance of τ at the amounts over prompts, by the jackknife, (K, K)."""
    prompts = tokens_Kn.shape[1]
    rest_Kn = rounds_Kn.sum(1, keepdims=True) - rounds_Kn
    if not (rest_Kn > 0).all():
        return np.zeros((len(tokens_Kn), len(tokens_Kn)))
    without_Kn = (tokens_Kn.sum(1, keepdims=True) - tokens_Kn) / rest_Kn
    without_Kn -= without_Kn.mean(1, keepdims=True)
    covariance: Values = (prompts - 1) / prompts * without_Kn @ without_Kn.T
    return covariance


def _rises(x_K: Values, tau_K: Values) -> bool:
    """Return whether τ rises with the text by the least squares of any curve; otherwise more text does not help."""
    x_GK = x_K ** -EXPONENTS[:, None]
    x_GK -= x_GK.mean(1, keepdims=True)
    return bool((x_GK @ (tau_K - tau_K.mean()) < 0).any())
