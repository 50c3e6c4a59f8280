"""The speed-up of the best of several configurations, on prompts that did not choose it.

The best of many is best in part by luck, so its own figure promises too much (the winner's curse): the best of 24 that
are all 1.20 times as fast reads 1.30 on 16 prompts. So prompts are held out in turn: the others choose the fastest, and
its times there, for what plain decoding wrote, are added up. That sum has no such luck.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from draftsmith.decode.measurement import intervals
from draftsmith.decode.measurement.intervals import Values
from draftsmith.scripts.measure.estimates import Observation

FOLDS = 10
"""Parts that are held out in turn; at most the number of batches."""
Configuration = TypeVar("Configuration", bound=Hashable)
Setting = TypeVar("Setting", bound=Hashable)


@dataclass(frozen=True)
class Timed:
    """The columns of a speed-up by unit: batches first, then prompts that are only replayed."""

    prompts: Sequence[Sequence[int]]
    """The prompts of each of U units."""
    sums: Values
    """Columns as `Observation.over` has them, (C, U); the last two are plain decoding's seconds and tokens."""

    @classmethod
    def of(cls, own: Observation, plain: Observation) -> "Timed":
        """Return the columns of a configuration over plain decoding."""
        return cls(own.units, np.array(intervals.padded(own.over(plain))))

    def without(self, prompts: set[int]) -> NDArray[np.bool_]:
        """Return a mask of the units that hold none of these prompts, (U,)."""
        return np.array([prompts.isdisjoint(unit) for unit in self.prompts])


def held_out_speedup(
    times: Mapping[Configuration, Mapping[Setting, Timed]], shown: Setting, folds: int = FOLDS
) -> float | None:
    """Return the speed-up of the fastest configuration in the setting `shown`, on prompts that did not choose it.

    The fastest is that of the best slowest setting. None if there are too few batches to choose and to judge.
    """
    first = next(iter(times.values()))[shown]
    plain_seconds = own_seconds = 0.0
    for fold in range(min(folds, int(np.count_nonzero(first.sums[-2])))):
        in_fold = np.arange(len(first.prompts)) % folds == fold
        held_out = {prompt for unit, is_held in zip(first.prompts, in_fold, strict=True) if is_held for prompt in unit}

        def slowest(settings: Mapping[Setting, Timed], held_out: set[int] = held_out) -> float:
            """Return the least speed-up of the settings on other prompts, −∞ without any."""
            rest = [timed.sums[:, timed.without(held_out)].sum(1) for timed in settings.values()]
            return min((_speedup(sums) for sums in rest if sums.all()), default=float("-inf"))

        speeds = {configuration: slowest(settings) for configuration, settings in times.items()}
        best = max(speeds, key=lambda configuration: speeds[configuration])
        timed = times[best][shown]
        sums = timed.sums[:, ~timed.without(held_out)].sum(1)
        if not np.isfinite(speeds[best]) or not sums.all():
            return None
        plain_seconds += sums[-2]
        own_seconds += sums[-2] / _speedup(sums)
    return plain_seconds / own_seconds


def _speedup(sums: Values) -> float:
    return float(np.prod(sums[::2] / sums[1::2]))
