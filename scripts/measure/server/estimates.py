"""From what servers counted and when parts came to estimates, with intervals over prompts."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from draftsmith.decode.measurement.intervals import (
    Estimate,
    Interval,
    rate_ratio,
    rate_ratio_interval,
    ratio,
    ratio_interval,
)
from draftsmith.decode.measurement.server_counts import ServerCounts, pooled
from draftsmith.scripts.measure.server.load import RequestRecord
from draftsmith.scripts.measure.server.observe import Observed, Role, ServerTurn, Setting
from draftsmith.scripts.report.serving_types import Percentiles, Source
from draftsmith.scripts.report.types import Speed

NOTHING = Estimate(None, None, 0)


@dataclass(frozen=True)
class Acceptance:
    """Accepted tokens and drafts of one setting."""

    source: Source
    total: ServerCounts | None
    """None where the server gives means alone."""
    by_prompt: Sequence[ServerCounts] = ()
    """In order of the prompts, all repeats together; empty where it is not known prompt by prompt."""
    places: Sequence[int] = field(default=())
    """Which prompts those are."""
    mean: float | None = None
    """The server's own τ, where it gives nothing else."""
    tree: bool = False

    @property
    def draft_length(self) -> int | None:
        """γ: drafted tokens a draft, rounded; None where nothing was drafted."""
        if self.total is None or not self.total.num_drafts:
            return None
        return max(1, round(self.total.num_draft_tokens / self.total.num_drafts))

    @property
    def one_length(self) -> bool:
        """Whether every draft was a chain of γ tokens: only then are the positions known that were tried."""
        total, length = self.total, self.draft_length
        return (
            total is not None
            and length is not None
            and not self.tree
            and total.num_draft_tokens == length * total.num_drafts
            and len(total.num_accepted_tokens_per_pos) > 0
        )

    def tried(self, counts: ServerCounts) -> float:
        """Return the positions that were tried: those accepted, and the rejected one of each draft that has one."""
        per_pos, length = counts.num_accepted_tokens_per_pos, self.draft_length or 0
        whole = per_pos[length - 1] if len(per_pos) >= length else 0
        return counts.num_accepted_tokens + counts.num_drafts - whole

    def alpha(self, confidence: float | None = None) -> Estimate:
        """Estimate α, accepted ÷ tried positions, with its 95 % interval, or a gate's at its level.

        Where each position is accepted with one probability, as α says, this is its maximum-likelihood estimate.
        """
        if not self.one_length or self.total is None:
            return NOTHING
        columns = [(c.num_accepted_tokens, self.tried(c)) for c in self.by_prompt]
        return self._estimate(self.total.num_accepted_tokens, self.tried(self.total), columns, confidence)

    def draft_acceptance_rate(self) -> Estimate:
        """Estimate accepted ÷ drafted tokens."""
        if self.total is None:
            return NOTHING
        columns = [(c.num_accepted_tokens, c.num_draft_tokens) for c in self.by_prompt]
        return self._estimate(self.total.num_accepted_tokens, self.total.num_draft_tokens, columns)

    def mean_acceptance_length(self, places: Set[int] | None = None) -> Estimate:
        """Estimate τ, 1 + accepted tokens ÷ drafts, of all prompts or of some."""
        if self.total is None:
            return Estimate(self.mean, None, 0)
        if places is not None:
            chosen = [c for c, place in zip(self.by_prompt, self.places, strict=True) if place in places]
            return ratio([c.num_accepted_tokens + c.num_drafts for c in chosen], [c.num_drafts for c in chosen])
        columns = [(c.num_accepted_tokens + c.num_drafts, c.num_drafts) for c in self.by_prompt]
        whole = self.total.num_accepted_tokens + self.total.num_drafts
        return self._estimate(whole, self.total.num_drafts, columns)

    def _estimate(
        self,
        numerator: float,
        denominator: float,
        columns: Sequence[tuple[float, float]],
        confidence: float | None = None,
    ) -> Estimate:
        """Return a ratio of the server's counts, with the interval over prompts that their own counts give.

        Parts lack what was accepted beyond the end of a text, which the counters have, and so are a little lower: the
        interval is moved by that difference.
        """
        if not denominator:
            return NOTHING
        value = numerator / denominator
        if not columns:
            return Estimate(value, None, 0)
        numerators, denominators = zip(*columns, strict=True)
        own = ratio(numerators, denominators)
        interval = own.ci95 if confidence is None else ratio_interval(numerators, denominators, confidence=confidence)
        if own.value is None or interval is None:
            return Estimate(value, None, own.n)
        moved = value - own.value
        return Estimate(value, (interval[0] + moved, interval[1] + moved), own.n)


def acceptance(observed: Observed, setting: Setting) -> Acceptance:
    """Return what was accepted in a setting, by the best source that the server offers."""
    blocks, engine = observed.blocks[setting]["server"], observed.engines["server"]
    records = observed.records(setting, "server")
    places = list(dict.fromkeys(record.prompt for record in records))
    counted = [record.counts for record in records]
    by_answers = all(counts is not None for counts in counted)
    if by_answers:
        totals = _by_prompt(records, places, [counts for counts in counted if counts is not None])
        return Acceptance("answers", pooled(totals), totals, places, tree=engine.tree)
    if engine.kind == "sglang":
        return _of_chats(blocks, records, engine.draft_tokens, engine.tree)
    total = pooled([block.counters for block in blocks])
    by_parts = [_of_parts(record, total) for record in records]
    if total.num_drafts and sum(counts.num_drafts for counts in by_parts) == total.num_drafts:
        return Acceptance("parts", total, _by_prompt(records, places, by_parts), places)
    return Acceptance("counters", total)


def _of_chats(
    blocks: Sequence[ServerTurn], records: Sequence[RequestRecord], drafted: int | None, tree: bool
) -> Acceptance:
    """Return what SGLang counts where it does not count answers: its steps, or in older versions a mean of the last."""
    calls = [block.verify_calls for block in blocks if block.verify_calls is not None]
    steps = sum(calls)
    if len(calls) == len(blocks) and steps and drafted:
        # The first token of each text comes without a draft.
        accepted = sum(record.tokens - 1 for record in records) - steps
        return Acceptance("counters", ServerCounts(steps, drafted * steps, max(accepted, 0), ()), tree=tree)
    means = [block.mean_acceptance_length for block in blocks if block.mean_acceptance_length is not None]
    return Acceptance("means", None, mean=sum(means) / len(means) if means else None, tree=tree)


def _of_parts(record: RequestRecord, total: ServerCounts) -> ServerCounts:
    """Return the counts of a text out of the parts that it came in: the prompt's step, then a part a step."""
    steps = [0] * (len(total.num_accepted_tokens_per_pos) + 1)
    for tokens in record.parts[1:]:
        if not 1 <= tokens <= len(steps):
            return ServerCounts()  # no ids, or steps that came together
        steps[tokens - 1] += 1
    drafted = int(total.num_draft_tokens // total.num_drafts) if total.num_drafts else 0
    return ServerCounts.of_histogram(steps, sum(steps) * drafted)


def _by_prompt(
    records: Sequence[RequestRecord], places: Sequence[int], counts: Sequence[ServerCounts]
) -> list[ServerCounts]:
    totals = dict.fromkeys(places, ServerCounts())
    for record, counted in zip(records, counts, strict=True):
        totals[record.prompt] += counted
    return list(totals.values())


@dataclass(frozen=True)
class Pace:
    """How fast one server wrote in one setting: tokens and seconds of each prompt, or of each turn."""

    tokens: Sequence[int]
    seconds: Sequence[float]

    def speed(self) -> Speed:
        """Return tokens per second: of all, and the median over prompts or turns."""
        speeds = sorted(tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True))
        whole = ratio(self.tokens, self.seconds)
        return Speed(whole.value, whole.ci95, whole.n, median=speeds[len(speeds) // 2])

    def speedup(self, other: "Pace") -> Estimate:
        """Return tokens per second ÷ those of the other, paired."""
        return rate_ratio(self.tokens, self.seconds, other.tokens, other.seconds)

    def speedup_interval(self, other: "Pace", confidence: float) -> Interval | None:
        """Return the interval of `speedup` at another level."""
        return rate_ratio_interval(self.tokens, self.seconds, other.tokens, other.seconds, confidence=confidence)


def by_latency(observed: Observed, setting: Setting) -> bool:
    """Say whether speed is that of single requests: one at a time, or at a rate, which bounds what is written."""
    return setting[1] == 1 or observed.config.rate is not None


def pace(observed: Observed, setting: Setting, role: Role, places: Set[int] | None = None) -> Pace:
    """Return how fast a server wrote in a setting, all repeats together.

    Args:
        observed: what was seen.
        setting: the setting.
        role: which server.
        places: of these prompts alone, where speed is that of single requests.
    """
    blocks = observed.blocks[setting][role]
    sums: dict[int, tuple[int, float]] = {}
    if by_latency(observed, setting):
        for record in observed.records(setting, role):
            if places is None or record.prompt in places:
                tokens, seconds = sums.get(record.prompt, (0, 0.0))
                sums[record.prompt] = tokens + record.tokens, seconds + record.ended
    else:
        turns = len(blocks) // observed.config.repeats
        for i, block in enumerate(blocks):
            tokens, seconds = sums.get(i % turns, (0, 0.0))
            sums[i % turns] = tokens + sum(record.tokens for record in block.records), seconds + block.seconds
    return Pace([tokens for tokens, _ in sums.values()], [seconds for _, seconds in sums.values()])


def percentiles(seconds: Sequence[float]) -> Percentiles:
    """Return the median and the upper percentiles over requests."""
    if not seconds:
        return Percentiles(0, None, None, None)
    p50, p90, p99 = (float(value) for value in np.percentile(seconds, [50, 90, 99]))
    return Percentiles(len(seconds), p50, p90, p99)


def token_seconds(record: RequestRecord) -> float | None:
    """Return the seconds a token from a request's first part to its last; None of a text that came in one part."""
    if record.first is None or record.last is None or len(record.parts) < 2:
        return None
    behind = record.tokens - (record.parts[0] or 1)
    return (record.last - record.first) / behind if behind > 0 else None
