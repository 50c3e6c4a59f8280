"""The speed-up of the best of several settings, on prompts that did not choose it.

The best of many settings is best in part by luck, so its own figure promises too much (the winner's curse). Of 24
settings that are all 1.20 times as fast, the best on 16 prompts reads 1.30. So prompts are held out in turn: the others
choose the fastest setting, and its times on the prompts held out are added up. The sum has no such luck.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from draftsmith.decode.measurement.intervals import Values
from draftsmith.scripts.measure.state import Group

FOLDS = 10
"""Parts that are held out in turn; no more than there are batches."""
Setting = TypeVar("Setting", bound=Hashable)
Condition = TypeVar("Condition", bound=Hashable)


@dataclass(frozen=True)
class Timed:
    """A setting and plain decoding in the same B batches."""

    prompts: Sequence[Sequence[int]]
    """Of each batch."""
    sums: Values
    """Tokens and seconds, then plain decoding's tokens and seconds, (4, B)."""

    @classmethod
    def of(cls, groups: Sequence[Group], plain: Sequence[Group]) -> "Timed":
        """Return the times of a setting's batches and of plain decoding's."""
        columns = [[float(group.tokens) for group in groups], [group.seconds for group in groups]]
        columns += [[float(group.tokens) for group in plain], [group.seconds for group in plain]]
        return cls([[row.prompt for row in group.rows] for group in groups], np.array(columns))

    def without(self, prompts: set[int]) -> NDArray[np.bool_]:
        """Return which batches hold none of these prompts, (B,)."""
        return np.array([prompts.isdisjoint(of) for of in self.prompts])


def held_out_speedup(
    settings: Mapping[Setting, Mapping[Condition, Timed]], shown: Condition, folds: int = FOLDS
) -> float | None:
    """Return the speed-up of the fastest setting under one condition, on prompts that did not choose it.

    Args:
        settings: those to choose from, with their times under each condition.
        shown: the condition; one of them.
        folds: parts of the prompts that are held out in turn.

    Returns:
        The speed-up; None where there are too few batches to choose on some and judge on others.
    """
    batches = next(iter(settings.values()))[shown].prompts
    sums = np.zeros(4)
    for fold in range(min(folds, len(batches))):
        own = np.arange(len(batches)) % folds == fold
        held = {prompt for batch, mine in zip(batches, own, strict=True) if mine for prompt in batch}

        def worst(of: Mapping[Condition, Timed], held: set[int] = held) -> float:
            """Return the least speed-up over the conditions on prompts that are not held out, −∞ if there are none."""
            rest = [timed.sums[:, timed.without(held)].sum(1) for timed in of.values()]
            return min((_speedup(sums) for sums in rest if sums.all()), default=float("-inf"))

        speeds = {setting: worst(of) for setting, of in settings.items()}
        best = max(speeds, key=lambda setting: speeds[setting])
        if not np.isfinite(speeds[best]):
            return None
        sums += settings[best][shown].sums[:, own].sum(1)
    return _speedup(sums) if sums.all() else None


def _speedup(sums: Values) -> float:
    tokens, seconds, plain_tokens, plain_seconds = sums
    return float(tokens / seconds * plain_seconds / plain_tokens)
