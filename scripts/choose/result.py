"""The choice and its evidence: choose.json."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.decode.measurement.turns import TOLERANCE
from draftsmith.scripts.choose.config import COPIES, NONE
from draftsmith.scripts.choose.forecast import Outlook, Trial, score
from draftsmith.scripts.kinds import KINDS

SCHEMA = "draftsmith.choose/1"
COST_ERROR = 0.02  # relative standard error of a candidate's costs, if the repeated measurements agree
DRAWS = 2000  # resamples of the held-out prompts


@dataclass(frozen=True)
class Standing:
    """A candidate's results."""

    name: str
    command: str | None  # that trains it; None for copies
    fields: dict[str, Any]  # of that command
    trials: list[Trial]
    dropped_after: int | None  # the number of the amount of text, from 1
    outlooks: list[Outlook]
    seconds_per_token: float  # of training, all epochs together

    @property
    def worth(self) -> tuple[float, float]:
        """Geometric means of its forecast speed-ups: with plain decoding where it does not pay, and without."""
        paying = [max(1.0, outlook.forecast.value or 0.0) for outlook in self.outlooks]
        return math.prod(paying) ** (1 / len(paying)), score(self.outlooks)

    @property
    def tree_alone(self) -> bool:
        """True if it drafts a tree, whose size does not follow γ."""
        return any(kind.tree_alone for kind in KINDS if kind.recipe and kind.recipe.command == self.command)

    def pays(self) -> list[Outlook]:
        """Return the settings at which its forecast is above plain decoding."""
        return [outlook for outlook in self.outlooks if (outlook.forecast.value or 0) > 1]

    def drafter(self, outlook: Outlook, directory: str) -> str:
        """Return the `--drafter` argument for its way to draft, given the directory that it will have."""
        if self.command is None:
            return self.name
        if outlook.way.last is None:
            return directory
        if self.tree_alone:
            return f"hybrid:{COPIES[0]}+{directory}"
        return f"hybrid:{COPIES[0]}+{directory}@last={outlook.way.last}"


@dataclass(frozen=True)
class Choice:
    """The choice, with everything that it rests on."""

    schema: str
    target: str
    environment: dict[str, Any]  # of the measured costs
    budget: float  # seconds for everything
    spent: float  # seconds, for choosing
    amounts: list[int]  # tokens of text of each rung
    standings: list[Standing]  # best first
    winner: str  # a name, or `none`
    reason: str
    close: list[str]  # candidates too close to the winner to tell
    more_text: dict[str, Estimate]  # the winner's forecast by tokens of text
    more_text_at: str  # the temperature and batch size of these forecasts, those of its best forecast
    commands: list[str]  # the next ones, in order
    failed: dict[str, str]  # candidate → why it was left out: its training failed, or there was no time for it
    ledger: dict[str, float]  # stage → seconds for choosing
    notes: list[str]  # sentences on the costs
    doubts: list[str]  # repeated measurements of costs that do not agree


def verdict(standings: Sequence[Standing]) -> tuple[str, str]:
    """Return the winner and the reason: the best candidate if plain decoding replaces it wherever it does not pay."""
    best = max(standings, key=lambda standing: standing.worth)
    if not (paying := best.pays()):
        return NONE, "no candidate is forecast to be faster than plain decoding at any of these settings"
    where = settings_text(paying)
    if len(paying) == len(best.outlooks):
        return best.name, f"the fastest by forecast, at {where}"
    return best.name, f"the fastest by forecast at {where}; elsewhere plain decoding is faster: do not draft there"


def close_to(winner: str, standings: Sequence[Standing], tables: Mapping[str, CostTable]) -> list[str]:
    """Return the candidates whose forecast is less than two standard errors below the winner's.

    The error is that of the present speed-ups over the held-out prompts, which all candidates share, and of the costs.
    """
    best, logs = by_name(standings)[winner], dict[str, np.ndarray]()
    error = TOLERANCE if any(table.doubts for table in tables.values()) else COST_ERROR
    for standing in standings:
        logs[standing.name] = np.zeros(DRAWS)
        for outlook in standing.outlooks:
            now, table = standing.trials[-1].replayed[outlook.temperature], tables[outlook.temperature]
            plain = np.array(now.plain_seconds(standing.name, table, outlook.rows))
            seconds = np.array(now.seconds(outlook.way, standing.name, table, outlook.rows))
            # The same resamples for all candidates, which answered the same prompts: the comparison is paired.
            weights = np.random.default_rng(0).multinomial(len(plain), [1 / len(plain)] * len(plain), DRAWS)
            speedups = np.maximum(1.0, weights @ plain / (weights @ seconds))
            logs[standing.name] += np.log(speedups) / len(standing.outlooks)
    return [
        standing.name
        for standing in standings
        if standing.name != winner
        and math.log(best.worth[0] / standing.worth[0])
        <= 2 * math.hypot(float(np.std(logs[winner] - logs[standing.name])), error * math.sqrt(2))
    ]


def settings_text(outlooks: Sequence[Outlook]) -> str:
    """Return temperatures and batch sizes in words."""
    return ", ".join(f"T={outlook.temperature} with {outlook.rows} at a time" for outlook in outlooks)


def shell(words: Sequence[object]) -> str:
    """Join words to a shell command."""
    return shlex.join(str(word) for word in words)


def by_name(standings: Sequence[Standing]) -> Mapping[str, Standing]:
    """Return standings by their names."""
    return {standing.name: standing for standing in standings}
