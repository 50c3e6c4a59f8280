"""Entries of a report: the ranges of their values, groups, costs, and what is known of a server from outside.

Costs are seconds and bytes on the measuring machine, and what they predict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.measurement.intervals import Estimate, Interval
from draftsmith.decode.measurement.server_counts import ServerCounts

Role = Literal["server", "baseline_server"]
Source = Literal["answers", "parts", "counters"]
"""answers: the server counted each answer. parts: the server's counters, with intervals by the parts in which answers
arrived, one a step. counters: the counters alone, without intervals."""


Grouping = Literal["category", "context"]
"""The groups into which a report divides acceptance: of prompts, and of tokens by the length before them."""


class Limited:
    """Keywords that the JSON Schema has for a value in addition to its type."""

    def __init__(self, **keywords: Any):
        self.keywords = keywords

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return handler(schema) | self.keywords


class Entry:
    """A part of a report. The schema forbids other keys, and takes its descriptions from the docstrings."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "use_attribute_docstrings": True}


Value = TypeVar("Value")
ByNumber = Annotated[Mapping[int, Value], Limited(propertyNames={"pattern": "^[1-9][0-9]*$"})]
"""A mapping by batch size, draft length or tokens of a forward."""
Name = Annotated[str, Limited(minLength=1)]
"""A drafter's name, short and unique."""
NonEmpty = Annotated[Sequence[Value], Limited(minItems=1)]
Count = Annotated[int, Limited(minimum=0)]
Positive = Annotated[int, Limited(minimum=1)]
NotNegative = Annotated[float, Limited(minimum=0)]
AboveZero = Annotated[float, Limited(exclusiveMinimum=0)]
Share = Annotated[float, Limited(minimum=0, maximum=1)]
Temperature = NotNegative
Seconds = ByNumber[NotNegative]
"""Seconds by batch size, or by tokens."""
Overheads = ByNumber[float]
"""Seconds by batch size; negative where a loop is faster than its parts alone."""


@dataclass(frozen=True)
class RunGroup(Entry):
    """A run's figures for one category; the speed-up is of batches that hold only its prompts."""

    prompts: Positive
    mean_acceptance_length: Estimate
    speedup: Estimate


@dataclass(frozen=True)
class CurveGroup(Entry):
    """A curve's figures for a group of prompts, or of tokens: there τ is the tokens ÷ the rounds that start at them."""

    prompts: Positive
    """The prompts of the group; of a group of tokens, those whose text has some."""
    alpha: Estimate
    mean_acceptance_length: ByNumber[Estimate]
    tokens: Count | None = None


@dataclass(frozen=True)
class Costs(Entry):
    """Seconds on this machine, after `context` tokens at the first temperature."""

    context: Positive
    target_seconds: ByNumber[Seconds]
    """t(k), the seconds of a forward over k tokens a row, by batch size, then k."""
    draft_seconds_per_token: Mapping[str, Seconds]
    overhead_seconds: Mapping[str, Overheads]
    """The rest of a round, by drafter."""
    tables: NonEmpty[CostTable]
    """The measured tables, one for each temperature."""

    @property
    def doubts(self) -> list[str]:
        """A line for each quantity whose two measurements disagree."""
        return [line for table in self.tables for line in table.doubts]


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


@dataclass(frozen=True)
class Forecast(Entry):
    """A drafter in llama.cpp: replayed acceptance at the prices of its rounds there."""

    proposer: Name
    draft_length: Positive
    temperature: Temperature
    slots: Positive
    mean_acceptance_length: Estimate
    """τ; above T = 0 that of the greedy verifier."""
    plain_seconds: AboveZero
    """Seconds of a token of plain decoding."""
    round_seconds: AboveZero
    """Seconds of a round, a mean over the replayed ones."""
    speedup: Estimate
    """The text alone, after its prompt."""
    request_speedup: Estimate
    """Whole requests: prompts included."""
    bounds: Interval | None
    """The interval of `speedup` at a level at which those of all forecasts hold together."""


@dataclass(frozen=True)
class PositionShares(Entry):
    """One position of the drafts: the steps that accept it ÷ all steps."""

    position: Positive
    expected: Share | None
    counted: Share | None
    difference: Interval | None
    """The interval of counted − expected; all positions together raise a false alarm in at most 1 % of cases. Null
    where there are too few prompts."""
    departs: bool
    """True if the interval excludes zero or, at T=0 on the same texts, if the integers differ."""


@dataclass(frozen=True)
class Departure(Entry):
    """The first token where the server differs."""

    what: Literal["prompt", "text", "round"]
    prompt: str
    """The prompt's id."""
    token: Count
    """The index in the prompt or text; for a round, that of its first token."""
    expected: str
    found: str


@dataclass(frozen=True)
class Cause(Entry):
    """A possible cause, with something to try."""

    name: Literal[
        "template", "not lossless", "target", "dtype", "draft sampling", "counting", "another drafter", "draft"
    ]
    evidence: str
    remedy: str


@dataclass(frozen=True)
class Reconciliation(Entry):
    """A server's counts in one setting against those expected from a report's rounds."""

    report: str
    proposer: Name
    verifier: Literal["probabilistic", "greedy"]
    temperature: Temperature
    concurrency: Positive
    draft_length: Positive
    answers: Positive
    same_prompts: Count | None
    """Answers whose prompt had the expected tokens; null where the server does not show them."""
    same_texts: Count | None
    """At T=0, answers that equal the expected texts; null where the server gives no tokens."""
    exact: bool
    """True if integers were compared: at T=0, if all texts are as expected and either the counts are equal, or requests
    were sent one at a time and the report is not in half precision."""
    expected: ServerCounts
    counted: ServerCounts
    positions: Sequence[PositionShares]
    first_position: Positive | None
    """The first position that departs."""
    agrees: bool
    departure: Departure | None
    causes: Sequence[Cause]
    """Possible causes, the likeliest first."""
    near_ties: Count | None = None
    """At T=0 against a report in half precision, answers that first differ where rounding decides, which are no
    departures; else null."""


@dataclass(frozen=True)
class ServedBy(Entry):
    """A server."""

    role: Role
    url: str
    kind: Literal["vllm", "sglang", "llama.cpp", "other"]
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
    """The latency of requests to one server in one setting, from sending."""

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


@dataclass(frozen=True)
class Serving(Entry):
    """The measured servers, and the method of measurement."""

    servers: NonEmpty[ServedBy]
    prompts_as: Literal["tokens", "text"]
    """text: the server encodes prompts, and applies the template to conversations."""
    warm_up: Count
    """Unmeasured requests before each setting."""
    counted: NonEmpty[Counted]
    latencies: NonEmpty[Latency]
    warnings: Sequence[str]
    reconciliations: Sequence[Reconciliation] = ()
    """The comparison of each setting with the expected report."""
