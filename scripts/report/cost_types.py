"""The costs in a report, seconds and bytes on the measuring machine, and what they predict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftsmith.decode.measurement.costs import CostTable
from draftsmith.scripts.report.entry import (
    AboveZero,
    ByNumber,
    Count,
    Entry,
    Name,
    NonEmpty,
    NotNegative,
    Positive,
    Temperature,
)

Seconds = ByNumber[NotNegative]
"""Seconds by batch size, or by tokens."""
Overheads = ByNumber[float]
"""Seconds by batch size; negative where a loop is faster than its parts alone."""


@dataclass(frozen=True)
class Costs(Entry):
    """Seconds on this machine, after `context` tokens at the first temperature."""

    context: Positive
    target_seconds: ByNumber[Seconds]
    """t(k), the seconds of a forward over k tokens a row, by batch size, then k."""
    draft_seconds: Mapping[str, ByNumber[Seconds]]
    """d(γ) by drafter, batch size, then γ."""
    draft_seconds_per_token: Mapping[str, Seconds]
    overhead_seconds: Mapping[str, Overheads]
    """The rest of a round, by drafter."""
    plain_overhead_seconds: Overheads
    prefill_seconds: Seconds
    tables: NonEmpty[CostTable]
    """The measured tables, one for each context and temperature."""

    @property
    def doubts(self) -> list[str]:
        """A line for each quantity whose two measurements disagree."""
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
    """The error of predicted speed-ups against measured ones."""

    median_relative_error: NotNegative
    points: Sequence[Prediction]


@dataclass(frozen=True)
class DrafterMemory(Entry):
    """The memory of a drafter."""

    weights_bytes: Count
    cache_bytes_per_token: Count | None


@dataclass(frozen=True)
class Memory(Entry):
    """The memory of target and drafters."""

    target_bytes: Count
    target_cache_bytes_per_token: Count | None
    drafters: Mapping[str, DrafterMemory]


@dataclass(frozen=True)
class LoadRange(Entry):
    """Batch sizes at which one draft length pays."""

    first: Positive
    last: Positive
    draft_length: Count
    """γ; 0 where plain decoding is faster."""


@dataclass(frozen=True)
class Goodput(Entry):
    """Predicted tokens a second of all texts that are decoded together, without prompts."""

    plain: AboveZero
    drafting: AboveZero
    """With the draft length of this batch size, or, where that is 0, with the best draft length."""


@dataclass(frozen=True)
class ByLoad(Entry):
    """The best draft length of a server by load, from costs and replay, with equal weights of the temperatures."""

    proposer: Name
    temperatures: NonEmpty[Temperature]
    ranges: NonEmpty[LoadRange]
    """Ranges without gaps, from one text at a time to the most that were measured."""
    goodput: ByNumber[Goodput]
    """Goodput by batch size."""
