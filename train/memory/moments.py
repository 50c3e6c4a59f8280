"""Times of a step at which memory may peak."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """A time of a step at which memory may peak, and the bytes that are not there at all times, by their use."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """The bytes of all parts."""
        return sum(self.parts.values())
