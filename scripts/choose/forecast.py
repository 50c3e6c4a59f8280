"""What a candidate will bring after more text: a learning curve of its speed-up, at each temperature and batch size.

The curve is that of τ (`decode.measurement.learning_curve`), through the speed-ups of one way to draft: with costs that
do not change, its speed-up is τ times a number, and behind copies nearly so.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.measurement.intervals import Estimate, ratio
from draftsmith.decode.measurement.learning_curve import LUCK, learning_curve
from draftsmith.scripts.choose.rounds import Replayed, Way
from draftsmith.scripts.choose.schedule import LEAST_AMOUNTS

LEAST_SPREAD = 2.0
"""Times that the greatest of them must be the least: a curve that may not fall is drawn upwards by the luck of closer
ones (docs/log/choose.md)."""


@dataclass(frozen=True)
class Trial:
    """A candidate that learned from some text."""

    drafter: str
    """Its directory; the kind of what is not trained."""
    tokens: int
    """Tokens of text that it learned from, each epoch."""
    seconds: float
    """Of its training."""
    replayed: dict[str, Replayed]
    """By temperature."""


@dataclass(frozen=True)
class Outlook:
    """What a candidate does, and will do, at one temperature and batch size, in its best way to draft there."""

    temperature: str
    rows: int
    way: Way
    mean_acceptance_length: Estimate
    """τ now."""
    now: Estimate
    """Speed-up over plain decoding, prompts left aside, after the last trial."""
    tokens: float
    """Tokens of text that the forecast is for."""
    forecast: Estimate
    """Speed-up then, with the luck of one further run; without an interval of fewer than four trials."""

    @property
    def foretold(self) -> bool:
        """Whether a curve was drawn: of one amount of text, or of close ones, the forecast is what was found."""
        return self.forecast != self.now


def outlook(
    name: str, trials: Sequence[Trial], table: CostTable, temperature: str, rows: int, tokens: float
) -> Outlook:
    """Return a candidate's outlook: the way that is fastest after the last trial, and what it will bring.

    Args:
        name: of the candidate, as the table has it.
        trials: on growing amounts of text.
        table: costs at this temperature.
        temperature: as trials name it.
        rows: B, texts decoded together.
        tokens: of text that the forecast is for.
    """
    last = trials[-1].replayed[temperature]
    plain = last.plain_seconds(name, table, rows)
    ways = last.ways()
    seconds = {way: last.seconds(way, name, table, rows) for way in ways}
    way = min(ways, key=lambda each: sum(seconds[each]))
    now = ratio(plain, seconds[way])
    counted = ratio(last.tokens, last.rounds(way))
    return Outlook(
        temperature, rows, way, counted, now, tokens, _forecast(name, trials, table, temperature, rows, way, tokens)
    )


def _forecast(
    name: str, trials: Sequence[Trial], table: CostTable, temperature: str, rows: int, way: Way, tokens: float
) -> Estimate:
    of_trials = [trial.replayed[temperature] for trial in trials]
    plain = [each.plain_seconds(name, table, rows) for each in of_trials]
    seconds = [each.seconds(way, name, table, rows) for each in of_trials]
    amounts = {trial.tokens for trial in trials}
    if len(amounts) < LEAST_AMOUNTS or max(amounts) < LEAST_SPREAD * min(amounts):
        return ratio(plain[-1], seconds[-1])
    # What luck does to τ it does to the speed-up, in its unit.
    per_token = float(np.sum(of_trials[-1].rounds(way)) / np.sum(of_trials[-1].tokens))
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
    name: str,
    trials: Sequence[Trial],
    tables: Mapping[str, CostTable],
    batch_sizes: Sequence[int],
    tokens: float,
) -> list[Outlook]:
    """Return a candidate's outlook at every temperature and batch size."""
    return [
        outlook(name, trials, tables[temperature], temperature, rows, tokens)
        for temperature in trials[-1].replayed
        for rows in batch_sizes
    ]
