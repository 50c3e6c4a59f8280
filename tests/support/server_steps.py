"""A server that writes texts step by step and knows of each what it emitted and accepted; it counts as it is told."""

import random
from dataclasses import dataclass, field

from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.scripts.serving.server_steps import Convention, CountedTexts


@dataclass
class Truth:
    """What every step did, added up one by one."""

    drafts: int = 0
    emitted: int = 0
    accepted: int = 0
    """Drafted tokens that stand in the text."""
    tried: int = 0
    """Those, and the rejected ones that the target replaced in the text."""

    @property
    def tau(self) -> float:
        return self.emitted / self.drafts

    @property
    def alpha(self) -> float:
        return self.accepted / self.tried


@dataclass
class SteppingServer:
    """Every drafted token is accepted with probability `alpha`, up to the first that is not."""

    convention: Convention
    alpha: float
    gamma: int
    seed: int = 0
    merges: bool = False
    """Whether two steps of a text come in one part."""
    positions: bool = True
    """Whether it counts by position."""
    drafted_to_end: bool = False
    """Whether drafted tokens count up to the end of a text alone."""
    truth: Truth = field(default_factory=Truth)

    def __post_init__(self) -> None:
        self.law = random.Random(self.seed)

    def text(self, length: int, prompt: int) -> CountedTexts:
        """Write a text of so many tokens, the last of which ends it."""
        rule, parts, written = self.convention, list[int](), 0
        drafts = drafted = accepted_sum = 0
        per_pos = [0] * (self.gamma + rule.bonus)
        if not rule.prompt_drafts:
            written, parts = 1, [1]
        while written < length:
            accepted = 0
            while accepted < self.gamma and self.law.random() < self.alpha:
                accepted += 1
            emitted = min(accepted + 1, length - written)
            written += emitted
            parts.append(emitted)
            inside = min(accepted, emitted)
            self.truth.drafts += 1
            self.truth.emitted += emitted
            self.truth.accepted += inside
            # A draft was rejected where the text has the target's token in its place.
            self.truth.tried += inside + (emitted > inside and accepted < self.gamma)
            counted = (accepted if rule.beyond_end else inside) + rule.bonus
            drafts += 1
            drafted += emitted if self.drafted_to_end and emitted == inside else self.gamma
            accepted_sum += counted
            for i in range(counted):
                per_pos[i] += 1
        if self.merges:
            merged = [sum(parts[i : i + 2]) for i in range(0, len(parts), 2)]
            parts = merged
        counts = ServerCounts(drafts, drafted, accepted_sum, tuple(per_pos) if self.positions else ())
        return CountedTexts(counts, length, 1, int(length == 1), (parts,), (prompt,))


def together(texts: list[CountedTexts], batch: int = 1) -> CountedTexts:
    """Count texts together; `batch` of them take their steps at once, which count as one if `by_batch`."""
    counts = sum((text.counts for text in texts), ServerCounts())
    if batch > 1:
        rows = [texts[i : i + batch] for i in range(0, len(texts), batch)]
        steps = sum(max(text.counts.num_drafts for text in of) for of in rows)
        counts = ServerCounts(
            steps, counts.num_draft_tokens, counts.num_accepted_tokens, counts.num_accepted_tokens_per_pos
        )
    return CountedTexts(
        counts,
        sum(text.tokens for text in texts),
        len(texts),
        sum(text.short for text in texts),
        [part for text in texts for part in text.parts],
        [prompt for text in texts for prompt in text.prompts],
    )
