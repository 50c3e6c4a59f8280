"""What was chosen, and what it rests on: choose.json."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.decode.measurement.turns import TOLERANCE
from draftsmith.scripts.choose.config import COPIES, NONE
from draftsmith.scripts.choose.forecast import Outlook, Trial, score
from draftsmith.scripts.kinds import KINDS

SCHEMA = "draftsmith.choose/1"
COST_ERROR = 0.02
"""The relative standard error of a candidate's costs, where those that were measured twice agree."""
DRAWS = 2000
"""Resamples of the held-out prompts."""


@dataclass(frozen=True)
class Standing:
    """A candidate, and how it stands."""

    name: str
    command: str | None
    """What trains it; None of copies."""
    fields: dict[str, Any]
    """Of that command."""
    trials: list[Trial]
    dropped_after: int | None
    """The amount of text after which it was dropped, from 1."""
    outlooks: list[Outlook]
    seconds_per_token: float
    """Of training, with all its epochs."""

    @property
    def worth(self) -> tuple[float, float]:
        """The geometric mean of its forecast speed-ups where drafting is left out if it does not pay; then of all."""
        paying = [max(1.0, outlook.forecast.value or 0.0) for outlook in self.outlooks]
        return math.prod(paying) ** (1 / len(paying)), score(self.outlooks)

    @property
    def tree_alone(self) -> bool:
        """Whether it drafts a tree, whatever γ is asked for."""
        return any(kind.tree_alone for kind in KINDS if kind.recipe and kind.recipe.command == self.command)

    def pays(self) -> list[Outlook]:
        """Return where its forecast is above plain decoding."""
        return [outlook for outlook in self.outlooks if (outlook.forecast.value or 0) > 1]

    def drafter(self, outlook: Outlook, directory: str) -> str:
        """Return what `--drafter` says of it in its way to draft, once it lies in a directory."""
        if self.command is None:
            return self.name
        if outlook.way.last is None:
            return directory
        if self.tree_alone:
            return f"hybrid:{COPIES[0]}+{directory}"
        return f"hybrid:{COPIES[0]}+{directory}@last={outlook.way.last}"


@dataclass(frozen=True)
class Choice:
    """What was chosen, and everything that it rests on."""

    schema: str
    target: str
    environment: dict[str, Any]
    """Where costs were measured."""
    budget: float
    spent: float
    """Seconds: in all, and for choosing."""
    amounts: list[int]
    """Tokens of text of each rung."""
    standings: list[Standing]
    """The best first."""
    winner: str
    """A name, or `none`."""
    reason: str
    close: list[str]
    """Those from which it cannot be told apart."""
    more_text: dict[str, Estimate]
    """What the winner would bring at several times the text."""
    more_text_at: str
    """At which temperature and batch size: those of its best forecast."""
    commands: list[str]
    """What to do next, one after the other."""
    failed: dict[str, str]
    """By candidate, why it was left out: its training failed, or there was no time for it."""
    ledger: dict[str, float]
    """Seconds of the time for choosing, by what they went into."""
    notes: list[str]
    """Sentences on the costs."""
    doubts: list[str]
    """Costs that were measured twice and do not agree."""


def verdict(standings: Sequence[Standing]) -> tuple[str, str]:
    """Return the winner, and why: the best where drafting can be left out wherever it does not pay."""
    best = max(standings, key=lambda each: each.worth)
    if not (paying := best.pays()):
        return NONE, "no candidate is forecast to be faster than plain decoding at any of these settings"
    where = settings_text(paying)
    if len(paying) == len(best.outlooks):
        return best.name, f"the fastest by forecast, at {where}"
    return best.name, f"the fastest by forecast at {where}; elsewhere plain decoding is faster: do not draft there"


def close_to(winner: str, standings: Sequence[Standing], tables: Mapping[str, CostTable]) -> list[str]:
    """Return those whose forecast is not below the winner's by more than twice its standard error.

    That is of the present speed-ups over the held-out prompts, which are the same for all, and of the costs.
    """
    best, logs = by_name(standings)[winner], dict[str, np.ndarray]()
    error = TOLERANCE if any(table.doubts for table in tables.values()) else COST_ERROR
    for its in standings:
        logs[its.name] = np.zeros(DRAWS)
        for outlook in its.outlooks:
            now, table = its.trials[-1].replayed[outlook.temperature], tables[outlook.temperature]
            plain = np.array(now.plain_seconds(its.name, table, outlook.rows))
            seconds = np.array(now.seconds(outlook.way, its.name, table, outlook.rows))
            # The same draws for all: they answered the same prompts.
            weights = np.random.default_rng(0).multinomial(len(plain), [1 / len(plain)] * len(plain), DRAWS)
            logs[its.name] += np.log(np.maximum(1.0, weights @ plain / (weights @ seconds))) / len(its.outlooks)
    return [
        its.name
        for its in standings
        if its.name != winner
        and math.log(best.worth[0] / its.worth[0])
        <= 2 * math.hypot(float(np.std(logs[winner] - logs[its.name])), error * math.sqrt(2))
    ]


def settings_text(outlooks: Sequence[Outlook]) -> str:
    """Name temperatures and batch sizes in words."""
    return ", ".join(f"T={each.temperature} with {each.rows} at a time" for each in outlooks)


def shell(words: Sequence[object]) -> str:
    """Return words as a line for a shell."""
    return shlex.join(str(word) for word in words)


def best_way(standing: Standing, outlook: Outlook, directory: Path) -> tuple[str, int]:
    """Return what `--drafter` and `--draft_length` say of a candidate's way to draft."""
    return standing.drafter(outlook, str(directory)), outlook.way.draft_length


def by_name(standings: Sequence[Standing]) -> Mapping[str, Standing]:
    """Return standings by their names."""
    return {standing.name: standing for standing in standings}
