"""Tokens, seconds and texts that decoding and servers both show, and their ratios with intervals."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from draftsmith.decode.measurement import intervals
from draftsmith.decode.measurement.intervals import Estimate, Interval
from draftsmith.decode.repetition import repeated_ngram_share
from draftsmith.scripts.measure.state import Group, Method, Row
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
class Observation:
    """The tokens and seconds of batches, or of a server's prompts or turns, in one setting."""

    tokens: Sequence[int]
    seconds: Sequence[float]
    prompts: Sequence[Sequence[int]] = ()
    """The prompts of each batch; empty for turns, which share no clock with single prompts."""
    texts: Sequence[Sequence[int]] | None = field(default=None, repr=False)
    """All texts; None if a server does not show their tokens."""
    rounds: Sequence[int] = ()
    """The rounds of each batch, those of its rows added up."""
    replayed: Mapping[int, tuple[float, float]] = field(default_factory=dict, repr=False)
    """Tokens and expected rounds of replayed prompts, these and more; empty where no replay stands for the decoder."""

    @classmethod
    def of(cls, groups: Sequence[Group], replayed: Mapping[int, tuple[float, float]] | None = None) -> "Observation":
        """Return the observation of decoded batches."""
        rows, prompts = rows_of(groups), [[row.prompt for row in group.rows] for group in groups]
        columns = [group.tokens for group in groups], [group.seconds for group in groups]
        rounds = [sum(row.counts.num_drafts for row in group.rows) for group in groups]
        return cls(*columns, prompts, [row.tokens for row in rows], rounds, replayed or {})

    @property
    def units(self) -> list[Sequence[int]]:
        """The prompts of each batch, then alone those that are only replayed: what intervals resample."""
        decoded = {prompt for batch in self.prompts for prompt in batch}
        return [*self.prompts, *([prompt] for prompt in self.replayed if prompt not in decoded)]

    @property
    def columns(self) -> list[Sequence[float]]:
        """The columns whose `ratio_product` is the tokens per second.

        τ varies between texts far more than the seconds of a round do. So where texts were replayed, the clock gives
        rounds per second, and all replayed texts give τ, the tokens per round: replay is a control variate (Glasserman
        2003, section 4.1), whose mean over many more prompts is known.
        """
        if not self.replayed:
            return [self.tokens, self.seconds]
        lengths = [[sum(self.replayed[prompt][i] for prompt in unit) for unit in self.units] for i in (0, 1)]
        return [self.rounds, self.seconds, *lengths]

    def within(self, prompts: Set[int]) -> "Observation":
        """Return the batches that hold only these prompts: a batch has one clock."""
        kept = [i for i, batch in enumerate(self.prompts) if prompts >= set(batch)]
        return Observation(
            [self.tokens[i] for i in kept],
            [self.seconds[i] for i in kept],
            [self.prompts[i] for i in kept],
            rounds=[self.rounds[i] for i in kept] if self.rounds else (),
            replayed={prompt: lengths for prompt, lengths in self.replayed.items() if prompt in prompts},
        )

    def speed(self) -> Speed:
        """Return tokens per second, in all and the median of batches."""
        speeds = sorted(tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True))
        whole = intervals.ratio_product(*self.columns)
        return Speed(whole.value, whole.ci95, whole.n, median=speeds[len(speeds) // 2])

    def over(self, other: "Observation") -> list[Sequence[float]]:
        """Return the columns whose `ratio_product` is the ratio to the other's tokens per second, paired."""
        inverse = [column for pair in zip(other.columns[1::2], other.columns[::2], strict=True) for column in pair]
        return [*self.columns, *inverse]

    def speedup(self, other: "Observation | None") -> Estimate:
        """Return the ratio to the other's tokens per second; no value without another."""
        return Estimate(None, None, 0) if other is None else intervals.ratio_product(*self.over(other))

    def speedup_interval(self, other: "Observation", confidence: float) -> Interval | None:
        """Return the interval of `speedup` at another confidence level."""
        return intervals.product_interval(*self.over(other), confidence=confidence)

    def repeated(self) -> float | None:
        """Return the share of repeated n-grams in the texts, if they are known."""
        return None if self.texts is None else repeated_ngram_share(self.texts)


Observations = Mapping[tuple[float, int, Method], Observation]
"""Observations by temperature, batch size and method; a server without a baseline has no plain ones."""
