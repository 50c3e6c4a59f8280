"""Learning curves: how often the interval of a forecast holds what a further run has, and how far off forecasts are.

Runs on a few amounts of text have the luck of their seeds, and are replayed on the same prompts.
"""

import numpy as np

from benchmarks.common import Figures
from benchmarks.gate import BenchGateConfig
from draftsmith.decode.measurement.learning_curve import learning_curve

TIMES = (2.0, 10.0)
LUCKS = (0.02, 0.05, 0.1)
AMOUNTS = (4, 6)
CURVES = {"logarithm": 0.0, "b = 0.1": 0.1, "b = 0.3": 0.3, "b = 0.5": 0.5, "b = 1": 1.0}
PROMPTS, EASIER, EACH = 64, 0.1, 0.1
"""Replayed prompts; how much they differ alike for all runs, and for each, in parts of their rounds."""
TOKENS = 64.0


def curve_figures(config: BenchGateConfig) -> Figures:
    """Return coverage and bias of forecasts, by the luck of runs, the number of amounts, and the true curve."""
    held: Figures = {}
    for luck in LUCKS:
        for amounts in AMOUNTS:
            for name, b in CURVES.items():
                held[f"luck {luck:g}, {amounts} amounts, {name}"] = _forecasts(config, luck, amounts, b)
    return {"what a further run has, by the interval of 95 %": held}


def true_length(times: np.ndarray, amounts: int, b: float) -> np.ndarray:
    """Return τ by times the largest amount: from 1.8 at the least one, up to 2.6 in the end, or by 0.15 a doubling."""
    grown = times * 2.0 ** (amounts - 1)
    return 2.6 - 0.8 * grown**-b if b else 1.8 + 0.15 * np.log2(grown)


def _forecasts(config: BenchGateConfig, luck: float, amounts: int, b: float) -> Figures:
    rng = np.random.default_rng(config.seed)
    sizes, ahead = 2.0 ** np.arange(1 - amounts, 1), true_length(np.array(TIMES), amounts, b)
    hits, missed, widths, limits = np.zeros(2), np.zeros(2), np.zeros(2), []
    for _ in range(config.simulations):
        tau = true_length(sizes, amounts, b) + rng.normal(0, luck, amounts)
        prompts = 1 + rng.normal(0, EASIER, PROMPTS) + rng.normal(0, EACH, (amounts, PROMPTS))
        rounds = TOKENS / tau[:, None] * prompts
        found = learning_curve(sizes.tolist(), np.full((amounts, PROMPTS), TOKENS), rounds, TIMES)
        come = ahead + rng.normal(0, luck, 2)
        values, ends = zip(*((of.value, of.ci95) for of in found.forecasts.values()), strict=True)
        low, high = np.array(ends, dtype=np.float64).T
        hits += (low <= come) & (come <= high)
        missed += np.array(values, dtype=np.float64) - ahead
        widths += high - low
        if found.limit.value is not None:
            limits.append(found.limit.value - 2.6)
    figures: Figures = {}
    for i, times in enumerate(TIMES):
        n = config.simulations
        figures |= {f"{times:g}×": hits[i] / n, f"{times:g}× width": widths[i] / n, f"{times:g}× bias": missed[i] / n}
    figures["limit known"] = len(limits) / config.simulations
    if limits and b:
        figures["its bias"] = float(np.mean(limits))
    return figures
