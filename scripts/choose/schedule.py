"""How the time is spent: which amounts of text all learn from, then half of them, then two; and what is left for one.

Successive halving (Jamieson & Talwalkar 2016, section 3), with amounts of text for its resource. All candidates learn
from two amounts before any is dropped: one says nothing of how they grow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RUNGS = 4
"""Amounts of text; a forecast with an interval needs as many."""
LEAST_AMOUNTS = 2
"""Amounts that all learn from, and from which a curve is drawn; of one the forecast is what was found."""
LEAST_GROWTH, MOST_GROWTH = 1.3, 6.0
"""Times that an amount of text is the one before it."""
FINALISTS = 2


@dataclass(frozen=True)
class Pace:
    """What a candidate's training takes."""

    per_token: float
    """Seconds for a token of text, with all its epochs."""
    beside: float
    """Seconds of a trial beside that: loading, saving, replay."""

    def trial(self, tokens: float) -> float:
        """Return the seconds of a trial."""
        return self.beside + self.per_token * tokens


def survivors(rung: int, candidates: int) -> int:
    """Return how many candidates learn from amount `rung`, from 1."""
    if rung <= LEAST_AMOUNTS:
        return candidates
    return min(candidates, max(FINALISTS, math.ceil(candidates / 2)) if rung < RUNGS else FINALISTS)


def begins(
    seconds: float, rung: int, tokens: float, paces: Sequence[Pace], candidates: int, write: float, least: float
) -> bool:
    """Return whether another amount of text is tried: one that is `least` times as large must fit the time.

    The other arguments are those of `growth`.
    """
    return _trials(rung + 1, tokens, least, paces, candidates, write) <= seconds


def _trials(rung: int, tokens: float, factor: float, paces: Sequence[Pace], candidates: int, write: float) -> float:
    """Return the seconds of amount `rung`, `factor` times the one before it: text, and trials at a mean pace."""
    mean = sum(pace.trial(tokens * factor) for pace in paces) / len(paces)
    return write * tokens * (factor - 1) + survivors(rung, candidates) * mean


def growth(
    seconds: float, rung: int, tokens: float, paces: Sequence[Pace], candidates: int, write: float, most: float
) -> float:
    """Return the greatest factor from each amount of text to the next by which all rungs behind `rung` fit the time.

    Args:
        seconds: that are left.
        rung: the last that ended, from 1.
        tokens: its amount.
        paces: of the candidates that go on; which of them do to the end is not known, so that a mean one does.
        candidates: how many there were at first.
        write: seconds for a token of the target's text.
        most: tokens that there are prompts for.
    """
    ahead = RUNGS - rung

    def needed(factor: float) -> float:
        amounts = [(rung + 1 + step, tokens * factor**step) for step in range(ahead)]
        return sum(_trials(of, before, factor, paces, candidates, write) for of, before in amounts)

    low, high = LEAST_GROWTH, min(MOST_GROWTH, max(LEAST_GROWTH, (most / tokens) ** (1 / ahead)))
    if needed(high) <= seconds:
        return high
    for _ in range(40):  # what is needed grows with the factor
        middle = (low + high) / 2
        low, high = (middle, high) if needed(middle) <= seconds else (low, middle)
    return low


def affordable(seconds: float, pace: Pace, written: float, write: float) -> float:
    """Return the tokens that a candidate can learn from in a time, in which what is not there yet is written too.

    Args:
        seconds: the time.
        pace: the candidate's.
        written: tokens of text that are there.
        write: seconds for another one.
    """
    left = max(0.0, seconds - pace.beside)
    tokens = left / pace.per_token
    return tokens if tokens <= written else (left + write * written) / (pace.per_token + write)


def kept(scores: Mapping[str, Any], count: int) -> list[str]:
    """Return the names with the best scores, in their order in `scores`."""
    best = sorted(scores, key=lambda name: scores[name], reverse=True)[:count]
    return [name for name in scores if name in best]
