"""Ratios over decoded texts, with intervals over prompts or over batches."""

from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.decode.measurement import intervals
from draftsmith.scripts.measure.state import Group, Row
from draftsmith.scripts.report.types import Speed

FALSE_ALARM = 0.05
"""The probability that replay and decoder are said to disagree somewhere in a report if they agree everywhere."""


def rows_of(groups: Sequence[Group]) -> list[Row]:
    """Return the rows of all prompts in order."""
    return [row for group in groups for row in group.rows]


def emitted_and_rounds(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """Return each prompt's tokens and rounds; the ratio of their sums is τ."""
    return [row.counts.num_emitted_tokens for row in rows], [row.counts.num_drafts for row in rows]


def same_length(
    decoded: tuple[Sequence[float], Sequence[float]], replayed: tuple[Sequence[float], Sequence[float]], compared: int
) -> bool | None:
    """Return whether a decoded and a replayed τ of the same prompts may be equal; None for too few prompts.

    `decoded` and `replayed` hold each prompt's tokens and (expected) rounds. `compared` is the number of such tests in
    the report: `FALSE_ALARM` is shared among them.
    """
    confidence = intervals.confidence_of_each(1 - FALSE_ALARM, compared)
    interval = intervals.difference_interval(*decoded, *replayed, confidence=confidence)
    return None if interval is None else interval[0] <= 0 <= interval[1]


@dataclass(frozen=True)
class Pace:
    """A speed: tokens and seconds of each batch, or of a server's prompts or turns."""

    tokens: Sequence[int]
    seconds: Sequence[float]

    @classmethod
    def of(cls, groups: Sequence[Group]) -> "Pace":
        """Return the pace of batches."""
        return cls([group.tokens for group in groups], [group.seconds for group in groups])

    def speed(self) -> Speed:
        """Return tokens per second, in all and the median."""
        speeds = sorted(tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True))
        whole = intervals.ratio(self.tokens, self.seconds)
        return Speed(whole.value, whole.ci95, whole.n, median=speeds[len(speeds) // 2])

    def speedup(self, other: "Pace") -> intervals.Estimate:
        """Return the ratio to the other's tokens per second, paired."""
        return intervals.rate_ratio(self.tokens, self.seconds, other.tokens, other.seconds)

    def speedup_interval(self, other: "Pace", confidence: float) -> intervals.Interval | None:
        """Return the interval of `speedup` at another confidence level."""
        columns = self.tokens, self.seconds, other.tokens, other.seconds
        return intervals.rate_ratio_interval(*columns, confidence=confidence)


def speed(groups: Sequence[Group]) -> Speed:
    """Return tokens per second, over all batches and the median."""
    return Pace.of(groups).speed()


def speedup(groups: Sequence[Group], others: Sequence[Group]) -> intervals.Estimate:
    """Return the ratio of two methods' tokens per second on the same batches."""
    return Pace.of(groups).speedup(Pace.of(others))


def speedup_interval(groups: Sequence[Group], others: Sequence[Group], confidence: float) -> intervals.Interval | None:
    """Return the interval of `speedup` at another confidence level."""
    return Pace.of(groups).speedup_interval(Pace.of(others), confidence)
