"""Times of a step at which memory may be at its most."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """A time of a step at which memory may be at its most, and what is there besides what always is."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.parts.values())
