"""A forecast of a candidate's speed-up after more text: a learning curve at each temperature and batch size.

The curve is that of τ (`decode.measurement.learning_curve`), applied to the speed-ups of one way to draft: at constant
costs the speed-up is proportional to τ, and nearly so when the candidate drafts after copies.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.measurement.intervals import Estimate, ratio
from draftsmith.decode.measurement.learning_curve import LUCK, learning_curve
from draftsmith.scripts.choose.rounds import ReplayedRounds, Way
from draftsmith.scripts.choose.schedule import LEAST_AMOUNTS

LEAST_SPREAD = 2.0
"""The least ratio of the greatest amount of text to the smallest. A curve that may not fall is biased upwards by noise
between closer amounts (docs/log/choose.md)."""


@dataclass(frozen=True)
class Trial:
    """A candidate trained on one amount of text."""

    drafter: str  # its directory; its kind if it is not trained
    tokens: int  # of text, in each epoch
    seconds: float  # of training
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
    forecast = _forecast(name, trials, table, temperature, rows, way, tokens)
    return Outlook(temperature, rows, way, tau, now, tokens, forecast)


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
    times = tokens / trials[-1].tokens
    sizes = [trial.tokens for trial in trials]
    curve = learning_curve(sizes, plain, seconds, [times], LUCK * unit, least=LEAST_AMOUNTS)
    return curve.forecasts[times]


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
