"""How fast a pair is predicted to write at a load: a table, so that routing needs no model and no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Tokens/s that one request gets, by temperature, category and the requests that a server has."""

    by_temperature: Mapping[float, Mapping[str | None, Sequence[float]]]
    """Temperature → category, None for all prompts together → tokens/s of each of 1, 2, 3, … requests at once."""

    def tokens_per_second(self, rows: int, temperature: float, category: str | None = None) -> float:
        """Return the speed of each of N requests, as measured at the nearest temperature.

        A category that was not measured is as all prompts together; more rows than the table has are as its last.
        """
        nearest = min(self.by_temperature, key=lambda measured: abs(measured - temperature))
        by_category = self.by_temperature[nearest]
        speeds = by_category.get(category) or by_category[None]
        return speeds[min(rows, len(speeds)) - 1]
