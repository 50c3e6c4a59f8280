"""Ratios over what was decoded, with intervals over prompts, or over the batches that they were decoded in."""

from collections.abc import Sequence

from draftsmith.decode.measurement.intervals import (
    Estimate,
    Interval,
    confidence_of_each,
    difference_interval,
    rate_ratio,
    rate_ratio_interval,
    ratio,
)
from draftsmith.scripts.measure.state import Group, Row
from draftsmith.scripts.report.types import Speed

FALSE_ALARM = 0.05
"""How often replay and decoder are said to disagree somewhere in a report where they agree everywhere."""


def rows_of(groups: Sequence[Group]) -> list[Row]:
    """Return the prompts' rows in order."""
    return [row for group in groups for row in group.rows]


def emitted_and_rounds(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """Return each prompt's tokens and rounds, whose sums' ratio is τ."""
    return [row.counts.num_emitted_tokens for row in rows], [row.counts.num_drafts for row in rows]


def same_length(
    decoded: tuple[Sequence[float], Sequence[float]], replayed: tuple[Sequence[float], Sequence[float]], compared: int
) -> bool | None:
    """Return whether a decoded and a replayed τ of the same prompts may be equal; None of too few prompts.

    Args:
        decoded: tokens and rounds of each prompt.
        replayed: tokens and expected rounds of each.
        compared: runs of the report that are compared so: any of them is a false alarm with `FALSE_ALARM` in all.
    """
    confidence = confidence_of_each(1 - FALSE_ALARM, compared)
    interval = difference_interval(*decoded, *replayed, confidence=confidence)
    return None if interval is None else interval[0] <= 0 <= interval[1]


def tokens_and_seconds(groups: Sequence[Group]) -> tuple[list[int], list[float]]:
    """Return what each batch wrote, and how long it took."""
    return [group.tokens for group in groups], [group.seconds for group in groups]


def speed(groups: Sequence[Group]) -> Speed:
    """Return tokens per second: the median over batches, and the whole."""
    speeds = sorted(group.tokens / group.seconds for group in groups)
    whole = ratio(*tokens_and_seconds(groups))
    return Speed(whole.value, whole.ci95, whole.n, median=speeds[len(speeds) // 2])


def speedup(groups: Sequence[Group], others: Sequence[Group]) -> Estimate:
    """Return tokens per second ÷ those of the other method on the same batches."""
    return rate_ratio(*tokens_and_seconds(groups), *tokens_and_seconds(others))


def speedup_interval(groups: Sequence[Group], others: Sequence[Group], confidence: float) -> Interval | None:
    """Return the interval of `speedup` at another confidence level."""
    return rate_ratio_interval(*tokens_and_seconds(groups), *tokens_and_seconds(others), confidence=confidence)
