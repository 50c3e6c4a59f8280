"""The schedule: amounts of text for all candidates, then for half of them, then for two; and the rest for the winner.

Successive halving (Jamieson & Talwalkar 2016, section 3) with amounts of text as its resource. No candidate is dropped
before it has learned from two amounts, because one does not show how it improves.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RUNGS = 4  # amounts of text; a forecast with an interval needs all
LEAST_AMOUNTS = 2  # amounts that all candidates learn from; a curve needs them
LEAST_GROWTH, MOST_GROWTH = 1.3, 6.0  # ratio of an amount of text to the one before it
FINALISTS = 2


@dataclass(frozen=True)
class Pace:
    """The time that a candidate's trials take."""

    per_token: float  # seconds for a token of text, all epochs together
    extra: float  # further seconds of a trial: loading, saving, replay

    def trial(self, tokens: float) -> float:
        """Return the seconds of a trial."""
        return self.extra + self.per_token * tokens


def survivors(rung: int, candidates: int) -> int:
    """Return the number of candidates that learn from amount `rung`, from 1."""
    if rung <= LEAST_AMOUNTS:
        return candidates
    return min(candidates, max(FINALISTS, math.ceil(candidates / 2)) if rung < RUNGS else FINALISTS)


def another_amount_fits(
    seconds: float, rung: int, tokens: float, paces: Sequence[Pace], candidates: int, write: float, least: float
) -> bool:
    """Return whether another amount of text fits the time if it grows by `least`; other arguments as for `growth`."""
    return _trials(rung + 1, tokens, least, paces, candidates, write) <= seconds


def _trials(rung: int, tokens: float, factor: float, paces: Sequence[Pace], candidates: int, write: float) -> float:
    """Return the seconds of amount `rung`, `factor` times the one before: its text, and its trials at a mean pace."""
    mean = sum(pace.trial(tokens * factor) for pace in paces) / len(paces)
    return write * tokens * (factor - 1) + survivors(rung, candidates) * mean


def growth(
    seconds: float, rung: int, tokens: float, paces: Sequence[Pace], candidates: int, write: float, most: float
) -> float:
    """Return the greatest factor from each amount of text to the next with which all rungs after `rung` fit the time.

    Args:
        seconds: the time that is left.
        rung: the last finished rung, from 1.
        tokens: its amount of text.
        paces: those of the remaining candidates. Later survivors are unknown, so their mean pace counts for each.
        candidates: the number at first.
        write: seconds to write a token of text.
        most: tokens that the prompts suffice for.
    """
    ahead = RUNGS - rung

    def needed(factor: float) -> float:
        amounts = [(rung + 1 + step, tokens * factor**step) for step in range(ahead)]
        return sum(_trials(step, before, factor, paces, candidates, write) for step, before in amounts)

    low, high = LEAST_GROWTH, min(MOST_GROWTH, max(LEAST_GROWTH, (most / tokens) ** (1 / ahead)))
    if needed(high) <= seconds:
        return high
    for _ in range(40):  # bisection: the needed time grows with the factor
        middle = (low + high) / 2
        low, high = (middle, high) if needed(middle) <= seconds else (low, middle)
    return low


def affordable(seconds: float, pace: Pace, written: float, write: float) -> float:
    """Return the tokens that a candidate can learn from in a time; text beyond `written` takes `write` s a token."""
    left = max(0.0, seconds - pace.extra)
    tokens = left / pace.per_token
    return tokens if tokens <= written else (left + write * written) / (pace.per_token + write)


def best_names(scores: Mapping[str, Any], count: int) -> list[str]:
    """Return the names with the `count` best scores, in the order of `scores`."""
    best = sorted(scores, key=lambda name: scores[name], reverse=True)[:count]
    return [name for name in scores if name in best]
