"""Ratios over what was decoded, with intervals over prompts, or over the batches that they were decoded in."""

from collections.abc import Sequence
from typing import Any

from draftsmith.decode.measurement.intervals import Estimate, rate_ratio, ratio
from draftsmith.scripts.measure.side_by_side import Group, Row


def rows_of(groups: Sequence[Group]) -> list[Row]:
    """Return the prompts' rows in order."""
    return [row for group in groups for row in group.rows]


def emitted_and_rounds(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """Return each prompt's tokens and rounds, whose sums' ratio is τ."""
    return [row.counts.num_emitted_tokens for row in rows], [row.counts.num_drafts for row in rows]


def tokens_and_seconds(groups: Sequence[Group]) -> tuple[list[int], list[float]]:
    """Return what each batch wrote, and how long it took."""
    return [group.tokens for group in groups], [group.seconds for group in groups]


def speed(groups: Sequence[Group]) -> dict[str, Any]:
    """Return tokens per second: the median over batches, and the whole."""
    speeds = sorted(group.tokens / group.seconds for group in groups)
    return {"median": speeds[len(speeds) // 2], **ratio(*tokens_and_seconds(groups))}


def speedup(groups: Sequence[Group], others: Sequence[Group], confidence: float = 0.95) -> Estimate:
    """Return tokens per second ÷ those of the other method on the same batches."""
    return rate_ratio(*tokens_and_seconds(groups), *tokens_and_seconds(others), confidence=confidence)


def scaled(estimate: Estimate, factor: float) -> Estimate:
    """Return an estimate times a number that is known."""
    bounds, value = estimate["ci95"], estimate["value"]
    return {
        "value": None if value is None else value * factor,
        "ci95": None if bounds is None else [bound * factor for bound in bounds],
    }
