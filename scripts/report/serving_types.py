"""Entries of a report on a server, which was measured from outside."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from draftsmith.decode.measurement.intervals import Interval
from draftsmith.scripts.report.entry import AboveZero, Count, Entry, NonEmpty, NotNegative, Positive, Temperature
from draftsmith.scripts.report.reconciliation import Reconciliation

Role = Literal["server", "baseline_server"]
Source = Literal["answers", "parts", "counters", "means"]
"""answers: the server counted each answer. parts: the server's counters, with intervals by the parts in which answers
arrived, one a step. counters: the counters alone, without intervals. means: means of the server's last steps."""


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
    """The latency of requests to one server in one setting, from sending or, with a rate, from arrival."""

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
    """The evidence for one setting's acceptance."""

    temperature: Temperature
    concurrency: Positive
    source: Source
    completion_tokens: Positive
    """The tokens of the answers."""
    generated_tokens: Count | None
    """The tokens that the server counted meanwhile, other clients' included; null where it shows no count."""
    convention: str | None = None
    """The server's rules of counting, as far as its counts determine them; null where they fit no known rules."""
    mean_acceptance_length_within: Interval | None = None
    """The least and the greatest τ that the counts allow, equal where the counts determine τ."""
    alpha_within: Interval | None = None


@dataclass(frozen=True)
class Serving(Entry):
    """The measured servers, and the method of measurement."""

    servers: NonEmpty[ServedBy]
    prompts_as: Literal["tokens", "text"]
    """text: the server encodes prompts, and applies the template to conversations."""
    rate: AboveZero | None
    """Requests per second, with random arrivals; null: each request is sent when another ends."""
    warm_up: Count
    """Unmeasured requests before each setting."""
    counted: NonEmpty[Counted]
    latencies: NonEmpty[Latency]
    warnings: Sequence[str]
    reconciliations: Sequence[Reconciliation] = ()
    """The comparison of each setting with the expected report."""
