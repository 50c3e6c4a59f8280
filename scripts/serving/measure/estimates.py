"""Estimates from servers' counts and answer times, with intervals over prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.decode.measurement.server_counts import ServerCounts, pooled
from draftsmith.scripts.measure.estimates import Observation
from draftsmith.scripts.report.entries import Percentiles, Role, Source
from draftsmith.scripts.report.types import Setting
from draftsmith.scripts.serving.measure.load import RequestRecord
from draftsmith.scripts.serving.measure.observe import Observed, ServerTurn
from draftsmith.scripts.serving.server_steps import CountedTexts, ServerSteps, server_steps


@dataclass(frozen=True)
class Acceptance:
    """Accepted tokens and drafts of one setting."""

    source: Source
    steps: ServerSteps
    total: ServerCounts | None
    """The server's counts; None if it gives only means."""
    tree: bool = False

    @property
    def draft_length(self) -> int | None:
        """γ: drafted tokens per draft, rounded; None if nothing was drafted."""
        if self.total is None or not self.total.num_drafts:
            return None
        return self.steps.draft_length or max(1, round(self.total.num_draft_tokens / self.total.num_drafts))

    @property
    def one_length(self) -> bool:
        """True if every draft was a chain of γ tokens: only then are the tried positions known."""
        total, length = self.total, self.draft_length
        return (
            total is not None
            and length is not None
            and not self.tree
            and total.num_draft_tokens == length * total.num_drafts
            and len(total.num_accepted_tokens_per_pos) > 0
        )

    def draft_acceptance_rate(self) -> Estimate:
        """Return accepted ÷ drafted tokens, as the server counts them."""
        return Estimate(None if self.total is None else self.total.draft_acceptance_rate(), None, 0)


def acceptance(observed: Observed, setting: Setting) -> Acceptance:
    """Return the acceptance in a setting from the server's best source: answers, counters, or means."""
    blocks, engine = observed.blocks[setting]["server"], observed.servers["server"].engine
    records = observed.records(setting, "server")
    gamma = observed.config.draft_length or engine.draft_tokens
    if any(record.counts is not None for record in records) and all(
        record.counts is not None or record.tokens == 1 for record in records
    ):
        alone = [_counted([record], record.counts or ServerCounts()) for record in records]
        return _acceptance("answers", alone, gamma, engine.tree)
    calls = [block.verify_calls for block in blocks if block.verify_calls is not None]
    if engine.kind != "sglang":
        figures = _acceptance("counters", [_counted(block.records, block.counters) for block in blocks], gamma)
    elif len(calls) == len(blocks) and any(calls) and gamma:
        chats = [
            replace(_counted(block.records, ServerCounts(count, gamma * count)), accepted=False)
            for block, count in zip(blocks, calls, strict=True)
        ]
        figures = _acceptance("counters", chats, gamma, engine.tree)
    else:
        means = any(block.mean_acceptance_length for block in blocks)
        return Acceptance("means", ServerSteps(gamma, {}), None if means else ServerCounts(), engine.tree)
    if not written_by_us(blocks):
        return replace(figures, steps=ServerSteps(gamma, {}))
    readings = figures.steps.readings.values()
    in_parts = readings and all(reading.in_parts and reading.by_prompt for reading in readings)
    return replace(figures, source="parts") if in_parts else figures


def written_by_us(blocks: Sequence[ServerTurn]) -> bool:
    """Return whether all that a server wrote meanwhile were our answers, as far as it says."""
    return all(block.generated_tokens in (None, sum(record.tokens for record in block.records)) for block in blocks)


def _counted(records: Sequence[RequestRecord], counts: ServerCounts) -> CountedTexts:
    return CountedTexts(
        counts,
        sum(record.tokens for record in records),
        len(records),
        sum(record.tokens == 1 for record in records),
        [record.parts for record in records],
        [record.prompt for record in records],
    )


def _acceptance(source: Source, groups: Sequence[CountedTexts], gamma: int | None, tree: bool = False) -> Acceptance:
    steps = server_steps(groups, gamma, tree)
    total = steps.counts(pooled([group.counts for group in groups]))
    if not groups[0].accepted and (bounds := steps.length_bounds()) is not None:
        written = bounds[0] * total.num_drafts  # each step also wrote one token of the target's own
        total = replace(total, num_accepted_tokens=round(written - total.num_drafts))
    return Acceptance(source, steps, total, tree)


def by_latency(observed: Observed, setting: Setting) -> bool:
    """Return whether speed is that of single requests: one at a time, or at a rate, which bounds the output."""
    return setting[1] == 1 or observed.config.rate is not None


def observation(observed: Observed, setting: Setting, role: Role) -> Observation:
    """Return a server's answers in a setting: by prompt if speed is by latency, else by turn.

    Of repeats that wrote equally much the fastest counts, as other work only adds time; others are summed.
    """
    blocks, records = observed.blocks[setting][role], observed.records(setting, role)
    texts = [record.token_ids for record in records if record.token_ids is not None]
    repeats: dict[int, list[tuple[int, float]]] = {}
    timed = [(record.prompt, record.tokens, record.ended) for record in records]
    latency = by_latency(observed, setting)
    if not latency:
        turns = len(blocks) // observed.config.repeats
        timed = [(i % turns, sum(r.tokens for r in block.records), block.seconds) for i, block in enumerate(blocks)]
    for key, tokens, seconds in timed:
        repeats.setdefault(key, []).append((tokens, seconds))
    alike = all(len({tokens for tokens, _ in pairs}) == 1 for pairs in repeats.values())
    chosen = [
        min(pairs) if alike else (sum(tokens for tokens, _ in pairs), sum(seconds for _, seconds in pairs))
        for pairs in repeats.values()
    ]
    return Observation(
        [tokens for tokens, _ in chosen],
        [seconds for _, seconds in chosen],
        [[prompt] for prompt in repeats] if latency else (),
        texts if len(texts) == len(records) else None,
    )


def percentiles(seconds: Sequence[float | None]) -> Percentiles:
    """Return the median and the upper percentiles over requests, those of unknown time left out."""
    known = [value for value in seconds if value is not None]
    if not known:
        return Percentiles(0, None, None, None)
    p50, p90, p99 = (float(value) for value in np.percentile(known, [50, 90, 99]))
    return Percentiles(len(known), p50, p90, p99)


def token_seconds(record: RequestRecord) -> float | None:
    """Return the seconds per token between a request's first and last part; None for one part."""
    if record.first is None or record.last is None or len(record.parts) < 2:
        return None
    later = record.tokens - (record.parts[0] or 1)
    return (record.last - record.first) / later if later > 0 else None
