"""The costs in a report: seconds and bytes on the machine that measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftsmith.decode.measurement.costs import CostTable
from draftsmith.scripts.report.entry import (
    AboveZero,
    ByNumber,
    Count,
    Entry,
    Name,
    NotNegative,
    Positive,
    Some,
    Temperature,
)

Seconds = ByNumber[NotNegative]
"""By batch size, or by tokens."""
Overheads = ByNumber[float]
"""Seconds by batch size; below 0 where a loop is faster than its parts alone."""


@dataclass(frozen=True)
class Costs(Entry):
    """Seconds on this machine, behind `context` tokens at the first temperature."""

    context: Positive
    target_seconds: ByNumber[Seconds]
    """By batch size, then k: t(k), a forward over k tokens a row."""
    draft_seconds: Mapping[str, ByNumber[Seconds]]
    """By drafter, batch size, then γ: d(γ)."""
    draft_seconds_per_token: Mapping[str, Seconds]
    overhead_seconds: Mapping[str, Overheads]
    """The rest of a round, by drafter."""
    plain_overhead_seconds: Overheads
    prefill_seconds: Seconds
    tables: Some[CostTable]
    """As they were measured: one for each context and temperature."""

    @property
    def doubts(self) -> list[str]:
        """Lines on what was measured twice and does not agree."""
        return [line for table in self.tables for line in table.doubts]


@dataclass(frozen=True)
class Prediction(Entry):
    """A run's predicted and measured speed-up."""

    proposer: Name
    draft_length: Positive
    batch_size: Positive
    temperature: Temperature
    predicted: float
    measured: AboveZero


@dataclass(frozen=True)
class PlannerCheck(Entry):
    """How far predicted speed-ups are from measured ones."""

    median_relative_error: NotNegative
    points: Sequence[Prediction]


@dataclass(frozen=True)
class DrafterMemory(Entry):
    """What a drafter adds to memory."""

    weights_bytes: Count
    cache_bytes_per_token: Count | None


@dataclass(frozen=True)
class Memory(Entry):
    """What target and drafters take."""

    target_bytes: Count
    target_cache_bytes_per_token: Count | None
    drafters: Mapping[str, DrafterMemory]
