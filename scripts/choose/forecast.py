"""Forecasts of candidates' speed-ups after more text, and the verdict: a curve at each temperature and batch size.

The curve is that of τ (`decode.measurement.learning_curve`), applied to the speed-ups of one way to draft: at constant
costs the speed-up is proportional to τ, and nearly so when the candidate drafts after copies.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.measurement.intervals import Estimate, ratio
from draftsmith.decode.measurement.learning_curve import LUCK, forecast
from draftsmith.decode.measurement.turns import TOLERANCE
from draftsmith.scripts.choose.config import NONE
from draftsmith.scripts.choose.rounds import ReplayedRounds, Way
from draftsmith.scripts.kinds import KINDS

COST_ERROR = 0.02  # relative standard error of a candidate's costs, if the repeated measurements agree
DRAWS = 2000  # resamples of the held-out prompts
LEAST_AMOUNTS = 2  # amounts of text that a curve needs
LEAST_SPREAD = 2.0
"""The least ratio of the greatest amount of text to the smallest. A curve that may not fall is biased upwards by noise
between closer amounts (docs/log/choose.md)."""


@dataclass(frozen=True)
class Trial:
    """A candidate trained on one amount of text."""

    drafter: str  # its directory; its kind if it is not trained
    tokens: int  # of text, in each epoch
    seconds: float  # of training
    extra: float  # further seconds: loading, saving, replay
    replayed: dict[str, ReplayedRounds]  # by temperature


@dataclass(frozen=True)
class Outlook:
    """A candidate's speed-up, now and forecast, at one temperature and batch size, in its best way to draft there."""

    temperature: str
    rows: int
    way: Way
    mean_acceptance_length: Estimate  # τ now
    now: Estimate  # speed-up over plain decoding after the last trial, without prompts
    tokens: float  # of text that the forecast is for
    forecast: Estimate  # with the noise of one further run; no interval from fewer than four trials

    @property
    def foretold(self) -> bool:
        """True if a curve was drawn; from one amount of text, or close ones, the forecast equals `now`."""
        return self.forecast != self.now


def outlook(
    name: str, trials: Sequence[Trial], table: CostTable, temperature: str, rows: int, tokens: float
) -> Outlook:
    """Return a candidate's fastest way to draft after the last trial, and its forecast for `tokens` of text."""
    last = trials[-1].replayed[temperature]
    plain = last.plain_seconds(name, table, rows)
    ways = last.ways()
    seconds = {way: last.seconds(way, name, table, rows) for way in ways}
    way = min(ways, key=lambda way: sum(seconds[way]))
    now = ratio(plain, seconds[way])
    tau = ratio(last.tokens, last.rounds(way))
    ahead = _forecast(name, trials, table, temperature, rows, way, tokens)
    return Outlook(temperature, rows, way, tau, now, tokens, ahead)


def _forecast(
    name: str, trials: Sequence[Trial], table: CostTable, temperature: str, rows: int, way: Way, tokens: float
) -> Estimate:
    replays = [trial.replayed[temperature] for trial in trials]
    plain = [replay.plain_seconds(name, table, rows) for replay in replays]
    seconds = [replay.seconds(way, name, table, rows) for replay in replays]
    amounts = {trial.tokens for trial in trials}
    if len(amounts) < LEAST_AMOUNTS or max(amounts) < LEAST_SPREAD * min(amounts):
        return ratio(plain[-1], seconds[-1])
    # The noise of τ, converted to the unit of the speed-up.
    per_token = float(np.sum(replays[-1].rounds(way)) / np.sum(replays[-1].tokens))
    unit = float(np.sum(plain[-1]) / np.sum(seconds[-1])) * per_token
    sizes = [trial.tokens for trial in trials]
    return forecast(sizes, plain, seconds, tokens / trials[-1].tokens, LUCK * unit)


def score(outlooks: Sequence[Outlook]) -> float:
    """Return the geometric mean of the forecast speed-ups."""
    values = [outlook.forecast.value or 0.0 for outlook in outlooks]
    return math.exp(sum(map(math.log, values)) / len(values)) if min(values) > 0 else 0.0


def outlooks(
    name: str, trials: Sequence[Trial], tables: Mapping[str, CostTable], batch_sizes: Sequence[int], tokens: float
) -> list[Outlook]:
    """Return a candidate's outlook at every temperature and batch size."""
    return [
        outlook(name, trials, tables[temperature], temperature, rows, tokens)
        for temperature in trials[-1].replayed
        for rows in batch_sizes
    ]


@dataclass(frozen=True)
class Standing:
    """A candidate's results."""

    name: str
    command: str | None  # that trains it; None for copies
    fields: dict[str, Any]  # of that command
    trials: list[Trial]
    dropped_after: int | None  # the number of the amount of text, from 1
    outlooks: list[Outlook]

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
        hybrid = f"hybrid:{self.trials[-1].replayed[outlook.temperature].copies}+{directory}"
        return hybrid if self.tree_alone else f"{hybrid}@last={outlook.way.last}"


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
    best, logs = next(standing for standing in standings if standing.name == winner), dict[str, np.ndarray]()
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
