"""Estimates from servers' counts and answer times, with intervals over prompts.

One rule of counting holds (`draftsmith.decode.measurement.server_counts`): the prompt's step emits a token and drafts
nothing, and each later step verifies a draft, or has found none. So τ is the texts' tokens after their first ones ÷
the steps. α is accepted ÷ tried positions, as the server counts them: also those past the end of a text.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np

from draftsmith.decode.measurement.intervals import Estimate, ratio, ratio_interval
from draftsmith.decode.measurement.server_counts import ServerCounts, pooled
from draftsmith.scripts.measure.estimates import Observation
from draftsmith.scripts.measure.server.load import RequestRecord
from draftsmith.scripts.measure.server.observe import Observed, ServerTurn
from draftsmith.scripts.report.entries import Percentiles, Role, Source
from draftsmith.scripts.report.types import Setting


@dataclass(frozen=True)
class TextSteps:
    """Steps of the target after the prompt's, in one or several texts."""

    steps: float = 0
    emitted: float = 0
    accepted: float = 0
    tried: float = 0
    """0 if the server does not tell."""

    def __add__(self, other: "TextSteps") -> "TextSteps":
        return TextSteps(
            self.steps + other.steps,
            self.emitted + other.emitted,
            self.accepted + other.accepted,
            self.tried + other.tried,
        )


@dataclass(frozen=True)
class Acceptance:
    """Accepted tokens and drafts of one setting."""

    source: Source
    total: ServerCounts
    draft_length: int | None
    """γ; None if nothing was drafted, or if drafts differ in length."""
    tree: bool = False
    steps: TextSteps | None = None
    """None if the counts do not tell."""
    by_prompt: Mapping[int, TextSteps] = field(default_factory=dict)
    """Steps by prompt; empty if not known."""

    def mean_acceptance_length(self, prompts: Set[int] | None = None) -> Estimate:
        """Estimate τ, emitted tokens ÷ steps, over all prompts or some, with its interval over prompts."""
        return self._estimate("emitted", "steps", None, prompts)

    def alpha(self, confidence: float | None = None) -> Estimate:
        """Estimate α, accepted ÷ tried positions, with its 95 % interval, or one of another level.

        If each position is accepted with the same probability, as α assumes, this is its maximum-likelihood estimate.
        """
        return self._estimate("accepted", "tried", confidence)

    def draft_acceptance_rate(self) -> Estimate:
        """Return accepted ÷ drafted tokens, as the server counts them."""
        return Estimate(self.total.draft_acceptance_rate(), None, 0)

    def _estimate(self, top: str, under: str, confidence: float | None, prompts: Set[int] | None = None) -> Estimate:
        texts = [steps for prompt, steps in self.by_prompt.items() if prompts is None or prompt in prompts]
        if texts:
            columns = list(map(attrgetter(top), texts)), list(map(attrgetter(under), texts))
            found = ratio(*columns)
            if confidence is not None and found.ci95 is not None:
                found = replace(found, ci95=ratio_interval(*columns, confidence=confidence))
            return found
        whole = TextSteps() if self.steps is None or prompts is not None else self.steps
        under_sum = getattr(whole, under)
        return Estimate(getattr(whole, top) / under_sum if under_sum else None, None, 0)


def acceptance(observed: Observed, setting: Setting) -> Acceptance:
    """Return the acceptance in a setting from the server's best source: counts of answers, or its counters."""
    blocks, engine = observed.blocks[setting]["server"], observed.servers["server"].engine
    records = observed.records(setting, "server")
    known = [record.counts for record in records if record.counts is not None]
    alone = bool(known) and all(record.counts is not None or record.tokens == 1 for record in records)
    total, emitted = pooled(known if alone else [block.counters for block in blocks]), sum(map(_emitted, records))
    drafts, drafted = total.num_drafts, total.num_draft_tokens
    gamma = observed.config.draft_length or engine.draft_tokens
    if gamma is None and drafts and drafted % drafts == 0:
        gamma = int(drafted // drafts) or None
    if drafts and not drafted and gamma is not None:  # SGLang's counter has steps alone
        total = replace(total, num_draft_tokens=gamma * drafts, num_accepted_tokens=max(emitted - drafts, 0))
    found = Acceptance("answers" if alone else "counters", total, gamma, engine.tree)
    # A step that verifies a draft emits a token at least.
    if drafts > emitted or not (alone or written_by_us(blocks)):
        return found
    steps = _steps(total, emitted, found)
    found = replace(found, steps=steps)
    if alone:
        texts = [_steps(record.counts or ServerCounts(), _emitted(record), found) for record in records]
    elif gamma is not None and all(map(_in_steps, blocks)):
        found = replace(found, source="parts")
        texts = _spread([_parts(record, gamma) for record in records], steps)
    else:
        return found
    by_prompt: dict[int, TextSteps] = {}
    for record, steps in zip(records, texts, strict=True):
        by_prompt[record.prompt] = by_prompt.get(record.prompt, TextSteps()) + steps
    return replace(found, by_prompt=by_prompt)


def written_by_us(blocks: Sequence[ServerTurn]) -> bool:
    """Return whether all that a server wrote meanwhile were our answers, as far as it says."""
    return all(block.generated_tokens in (None, sum(record.tokens for record in block.records)) for block in blocks)


def _emitted(record: RequestRecord) -> int:
    """Return the tokens of a text that steps with a draft emitted."""
    return record.tokens - 1


def _steps(counts: ServerCounts, emitted: int, of: Acceptance) -> TextSteps:
    drafts, per_pos, gamma = counts.num_drafts, counts.num_accepted_tokens_per_pos, of.draft_length
    chains = not of.tree and gamma is not None and counts.num_draft_tokens == gamma * drafts
    tried = drafts + sum(per_pos[: gamma - 1]) if chains and per_pos and gamma is not None else 0
    # Each step emits a token of the target's; one without a draft, as copies have, is in no counter.
    steps = max(drafts, emitted - counts.num_accepted_tokens) if of.total.num_drafts else 0
    return TextSteps(steps, emitted, counts.num_accepted_tokens, tried)


def _in_steps(block: ServerTurn) -> bool:
    """Return whether each part of a turn's answers was a step."""
    parts = [record.parts for record in block.records]
    whole = all(sizes and sizes[0] == 1 and 0 not in sizes for sizes in parts)
    return whole and sum(len(sizes) - 1 for sizes in parts) == block.counters.num_drafts


def _parts(record: RequestRecord, draft_length: int) -> TextSteps:
    """Return a text's steps by its parts; what its end cut off is not in them."""
    sizes = record.parts[1:]
    return TextSteps(len(sizes), sum(sizes), sum(sizes) - len(sizes), sum(min(size, draft_length) for size in sizes))


def _spread(texts: Sequence[TextSteps], total: TextSteps) -> list[TextSteps]:
    """Return texts whose sum is the server's: what it counted past their ends is spread evenly."""
    seen, share = sum(texts, TextSteps()), 1 / len(texts)
    rest = TextSteps(0, 0, (total.accepted - seen.accepted) * share, (total.tried - seen.tried) * share)
    spread = [text + rest for text in texts]
    return spread if total.tried else [replace(text, tried=0) for text in spread]


def observation(observed: Observed, setting: Setting, role: Role) -> Observation:
    """Return a server's answers in a setting: by prompt if one request is sent at a time, else by turn."""
    blocks, records = observed.blocks[setting][role], observed.records(setting, role)
    texts = [record.token_ids for record in records if record.token_ids is not None]
    all_texts = texts if len(texts) == len(records) else None
    if setting[1] > 1:
        tokens = [sum(record.tokens for record in block.records) for block in blocks]
        return Observation(tokens, [block.seconds for block in blocks], (), all_texts)
    columns = [record.tokens for record in records], [record.ended for record in records]
    return Observation(*columns, [[record.prompt] for record in records], all_texts)


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
