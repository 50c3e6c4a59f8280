"""The speed-up of the best of several configurations, on prompts that did not choose it.

The best of many is best in part by luck, so its own figure promises too much (the winner's curse): the best of 24 that
are all 1.20 times as fast reads 1.30 on 16 prompts. So prompts are held out in turn: the others choose the fastest, and
its times on the held-out prompts are added up. That sum has no such luck.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from draftsmith.decode.measurement.intervals import Values
from draftsmith.scripts.measure.estimates import Observation

FOLDS = 10
"""Parts that are held out in turn; at most the number of batches."""
Configuration = TypeVar("Configuration", bound=Hashable)
Setting = TypeVar("Setting", bound=Hashable)


@dataclass(frozen=True)
class Timed:
    """Tokens and seconds of a configuration and of plain decoding in the same B batches.

    `prompts` are each batch's; `sums` are tokens and seconds, then plain decoding's tokens and seconds, (4, B).
    """

    prompts: Sequence[Sequence[int]]
    sums: Values

    @classmethod
    def of(cls, own: Observation, plain: Observation) -> "Timed":
        """Return the times of a configuration's batches and of plain decoding's."""
        return cls(own.prompts, np.array([own.tokens, own.seconds, plain.tokens, plain.seconds], np.float64))

    def without(self, prompts: set[int]) -> NDArray[np.bool_]:
        """Return a mask of the batches that hold none of these prompts, (B,)."""
        return np.array([prompts.isdisjoint(batch) for batch in self.prompts])


def held_out_speedup(
    times: Mapping[Configuration, Mapping[Setting, Timed]], shown: Setting, folds: int = FOLDS
) -> float | None:
    """Return the speed-up of the fastest configuration in the setting `shown`, on prompts that did not choose it.

    The fastest is that of the best slowest setting. None if there are too few batches to choose and to judge.
    """
    batches = next(iter(times.values()))[shown].prompts
    sums = np.zeros(4)
    for fold in range(min(folds, len(batches))):
        in_fold = np.arange(len(batches)) % folds == fold
        held_out = {prompt for batch, is_held in zip(batches, in_fold, strict=True) if is_held for prompt in batch}

        def slowest(settings: Mapping[Setting, Timed], held_out: set[int] = held_out) -> float:
            """Return the least speed-up of the settings on other prompts, −∞ without any."""
            rest = [timed.sums[:, timed.without(held_out)].sum(1) for timed in settings.values()]
            return min((_speedup(sums) for sums in rest if sums.all()), default=float("-inf"))

        speeds = {configuration: slowest(settings) for configuration, settings in times.items()}
        best = max(speeds, key=lambda configuration: speeds[configuration])
        if not np.isfinite(speeds[best]):
            return None
        sums += times[best][shown].sums[:, in_fold].sum(1)
    return _speedup(sums) if sums.all() else None


def _speedup(sums: Values) -> float:
    tokens, seconds, plain_tokens, plain_seconds = sums
    return float(tokens / seconds * plain_seconds / plain_tokens)
