"""Entries of a report on a server that was measured from outside."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from draftsmith.decode.measurement.intervals import Interval
from draftsmith.scripts.report.entry import AboveZero, Count, Entry, NotNegative, Positive, Some, Temperature
from draftsmith.scripts.report.reconciliation import Reconciliation

Role = Literal["server", "baseline_server"]
Source = Literal["answers", "parts", "counters", "means"]
"""answers: each answer was counted by the server; parts: counters of all, and intervals by the parts that answers came
in, a part a step; counters: of all, without an interval; means: the server shows means of its steps alone."""


@dataclass(frozen=True)
class ServedBy(Entry):
    """A server."""

    role: Role
    url: str
    kind: Literal["vllm", "sglang", "other"]
    version: str | None
    model: str


@dataclass(frozen=True)
class Percentiles(Entry):
    """Seconds, over requests."""

    count: Count
    p50: NotNegative | None
    p90: NotNegative | None
    p99: NotNegative | None


@dataclass(frozen=True)
class Latency(Entry):
    """How long requests to one server took in one setting, since they were sent or, with a rate, since they arrived."""

    role: Role
    temperature: Temperature
    concurrency: Positive
    first_token: Percentiles
    """TTFT."""
    token: Percentiles
    """TPOT: from the first part to the last ÷ the tokens between them."""
    request: Percentiles


@dataclass(frozen=True)
class Counted(Entry):
    """What one setting's acceptance rests on."""

    temperature: Temperature
    concurrency: Positive
    source: Source
    completion_tokens: Positive
    """Of the answers."""
    generated_tokens: Count | None
    """That the server counted meanwhile, for whomever; null where it does not say."""
    convention: str | None = None
    """How the server counts, as far as its counts tell; null where they fit no way that is known."""
    mean_acceptance_length_within: Interval | None = None
    """The least and the greatest τ that the counts allow: the same figure twice where they determine it."""
    alpha_within: Interval | None = None


@dataclass(frozen=True)
class Serving(Entry):
    """A server that was measured, and how."""

    servers: Some[ServedBy]
    prompts_as: Literal["tokens", "text"]
    """text: the server encodes them, and templates conversations."""
    rate: AboveZero | None
    """Requests per second that arrive at random; null: the next is sent when one ends."""
    warm_up: Count
    """Requests before each setting that were not measured."""
    counted: Some[Counted]
    latencies: Some[Latency]
    warnings: Sequence[str]
    reconciliations: Sequence[Reconciliation] = ()
    """Each setting beside the report that was expected."""
