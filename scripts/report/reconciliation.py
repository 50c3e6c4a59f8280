"""Entries of a report on a server that was compared with a local measurement."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from draftsmith.decode.measurement.intervals import Interval
from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.scripts.report.entry import Count, Entry, Name, NotNegative, Positive, Share, Temperature


@dataclass(frozen=True)
class SeenCounts(Entry):
    """What a server counts, or is expected to; whole numbers at T=0."""

    num_drafts: NotNegative
    num_draft_tokens: NotNegative
    num_accepted_tokens: NotNegative
    num_accepted_tokens_per_pos: Sequence[NotNegative]

    @classmethod
    def of(cls, counts: ServerCounts) -> "SeenCounts":
        """Return counts for the report."""
        per_pos = list(counts.num_accepted_tokens_per_pos)
        while per_pos and not per_pos[-1]:  # positions of which nothing was accepted may be listed or not
            per_pos.pop()
        rounded = [
            round(value, 3) for value in (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens)
        ]
        return cls(rounded[0], rounded[1], rounded[2], [round(value, 3) for value in per_pos])


@dataclass(frozen=True)
class PositionShares(Entry):
    """One position of the drafts."""

    position: Positive
    expected: Share | None
    """Steps that accept it ÷ all steps."""
    counted: Share | None
    difference: Interval | None
    """The interval of counted − expected, at a level at which all positions together raise a false alarm in 1 % of
    cases at most; null where there are too few prompts."""
    departs: bool
    """Whether that excludes zero or, at T=0 on the same texts, whether the integers differ."""


@dataclass(frozen=True)
class Departure(Entry):
    """The first place where the server does otherwise."""

    what: Literal["prompt", "text", "round"]
    prompt: str
    """The prompt's id."""
    token: Count
    """The place in the prompt, or in the text; of a round, of its first token."""
    expected: str
    found: str


@dataclass(frozen=True)
class Cause(Entry):
    """What may be the reason."""

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
    """What to try."""


@dataclass(frozen=True)
class Reconciliation(Entry):
    """A server's counts beside those that a report's rounds make it count, in one setting."""

    report: str
    proposer: Name
    verifier: Literal["probabilistic", "greedy"]
    temperature: Temperature
    concurrency: Positive
    draft_length: Positive
    answers: Positive
    same_prompts: Count | None
    """Answers whose prompt had the expected tokens; null where the server does not say."""
    same_texts: Count | None
    """At T=0, answers that are the expected texts; null where the server gives no tokens."""
    exact: bool
    """Whether integers were compared: at T=0 where all texts are those expected, and one request at a time was under
    way and the report is no half precision's, or they are equal all the same."""
    expected: SeenCounts
    counted: SeenCounts
    positions: Sequence[PositionShares]
    first_position: Positive | None
    """The first position that departs."""
    agrees: bool
    departure: Departure | None
    causes: Sequence[Cause]
    """The likeliest first."""
    near_ties: Count | None = None
    """At T=0 beside a report in half precision, answers that part from the expected text where rounding decides: they
    are no departure; null elsewhere."""
    convention: str | None = None
    """How the server counts: what the expected counts were computed for."""
