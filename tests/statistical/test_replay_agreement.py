"""How often a report of honest runs says that replay and decoder disagree, and one of a wrong decoder."""

import numpy as np
import pytest

from draftsmith.scripts.measure.estimates import FALSE_ALARM, same_length

RUNS, PROMPTS, TOKENS = 8, 16, 48
RATE = 0.55
"""Accepted shares of drafted tokens, γ = 3."""


def rounds(rng: np.random.Generator, rate: float, texts: int) -> np.ndarray:
    """Return how many rounds each of some texts takes, (texts,)."""
    accepted = np.cumprod(rng.random((texts, TOKENS, 3)) < rate, axis=-1).sum(-1)
    return 1 + (np.cumsum(1 + accepted, axis=-1) < TOKENS).sum(-1)


def refused(rng: np.random.Generator, decoded_rate: float) -> bool:
    """Say whether a report of eight runs has one where they disagree; texts and their difficulty are each prompt's."""
    tokens = [TOKENS] * PROMPTS
    rates = np.clip(RATE + 0.15 * rng.standard_normal(PROMPTS), 0.05, 0.95)
    # What replay expects of a text, nearly without noise.
    expected = [rounds(rng, rate, 12).mean() for rate in rates]
    for _ in range(RUNS):
        decoded = [int(rounds(rng, rate * decoded_rate, 1)[0]) for rate in rates]
        if not same_length((tokens, decoded), (tokens, expected), RUNS):
            return True
    return False


@pytest.mark.parametrize(("decoded_rate", "least", "most"), [(1.0, 0, 2 * FALSE_ALARM), (0.75, 0.9, 1)])
def test_reports_are_told_apart(decoded_rate, least, most):
    """Of 40 reports the false-alarm rate exceeds a tenth by chance once in 70 times; the seed is fixed."""
    rng = np.random.default_rng(0)
    share = np.mean([refused(rng, decoded_rate) for _ in range(40)])
    assert least <= share <= most
