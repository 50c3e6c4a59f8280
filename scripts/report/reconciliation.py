"""Entries of a report on the comparison of a server with a local measurement."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from draftsmith.decode.measurement.intervals import Interval
from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.scripts.report.entry import Count, Entry, Name, NotNegative, Positive, Share, Temperature


@dataclass(frozen=True)
class SeenCounts(Entry):
    """The counts of a server, or their expectations; whole numbers at T=0."""

    num_drafts: NotNegative
    num_draft_tokens: NotNegative
    num_accepted_tokens: NotNegative
    num_accepted_tokens_per_pos: Sequence[NotNegative]

    @classmethod
    def of(cls, counts: ServerCounts) -> "SeenCounts":
        """Return rounded counts for the report."""
        per_pos = list(counts.num_accepted_tokens_per_pos)
        while per_pos and not per_pos[-1]:  # servers may or may not list positions without accepted tokens
            per_pos.pop()
        drafts, drafted, accepted = counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens
        return cls(round(drafts, 3), round(drafted, 3), round(accepted, 3), [round(value, 3) for value in per_pos])


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
    """The first place where the server differs."""

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
        "template",
        "not lossless",
        "target",
        "dtype",
        "draft sampling",
        "another drafter",
        "draft",
        "draft dtype",
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
    expected: SeenCounts
    counted: SeenCounts
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
    convention: str | None = None
    """The server's rules of counting, for which the expected counts were computed."""
