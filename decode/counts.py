"""Counts of drafted, accepted and emitted tokens, and the ratios of their totals.

Ratios with intervals over prompts are those of `draftsmith.decode.measurement.intervals`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from draftsmith.decode.tree import Tree
from draftsmith.decode.validation import Count


@dataclass(frozen=True)
class Ratios:
    """Counts, or their expected values from replay, with their ratios; `Counts` explains the fields."""

    num_drafts: float
    num_draft_tokens: float
    num_accepted_tokens: float
    num_accepted_tokens_per_pos: tuple[float, ...]
    num_draft_tokens_per_pos: tuple[float, ...]
    num_reached_per_pos: tuple[float, ...]
    num_emitted_tokens: float

    def draft_acceptance_rate(self) -> float | None:
        """Return accepted ÷ drafted tokens, bonus excluded; it depends on the draft length. None without drafts."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    def mean_acceptance_length(self) -> float | None:
        """Return τ, tokens emitted per forward of the target, bonus included; plain decoding has 1. None if no round.

        It is 1 + accepted ÷ rounds, except that a round whose accepted draft ends the text has no bonus.
        """
        return _ratio(self.num_emitted_tokens, self.num_drafts)

    def acceptance_per_position(self) -> list[float | None]:
        """Return, for each position, the rounds that accepted it ÷ the rounds that drafted it (unconditional)."""
        return [_ratio(*x) for x in zip(self.num_accepted_tokens_per_pos, self.num_draft_tokens_per_pos, strict=True)]

    def conditional_acceptance(self) -> list[float | None]:
        """Return, for each position, its acceptance given that every position before it was accepted."""
        return [_ratio(*x) for x in zip(self.num_accepted_tokens_per_pos, self.num_reached_per_pos, strict=True)]


@dataclass(frozen=True)
class Counts(Ratios):
    """Integer counts of speculative decoding; they add up across prompts, ranks and runs.

    The names are vLLM's (`vllm:spec_decode_*`). A round is one drafting phase and one forward of the target. Positions
    past the length limit are not drafted. Where the text ends inside an accepted block (end of sequence, a stop
    string), the later positions count neither as drafted nor as accepted, since they are no failures of the drafter. A
    round cut in either way still counts. Plain decoding has one round without a draft per token.
    """

    num_drafts: Count = 0
    """Rounds."""
    num_draft_tokens: Count = 0
    """Drafted tokens; all nodes of a tree, although a round accepts one path at most."""
    num_accepted_tokens: Count = 0
    """Accepted drafted tokens, the bonus token excluded."""
    num_accepted_tokens_per_pos: tuple[Count, ...] = ()
    """Rounds whose drafted token i was accepted (and so all before it)."""
    num_draft_tokens_per_pos: tuple[Count, ...] = ()
    """Rounds that drafted position i."""
    num_reached_per_pos: tuple[Count, ...] = ()
    """Rounds that drafted position i and accepted every position before it."""
    num_emitted_tokens: Count = 0
    """Tokens that entered the text: accepted ones, corrections and bonus tokens."""

    @classmethod
    @lru_cache(maxsize=1024)
    def of_round(cls, draft: Tree | int, accepted: int, emitted: int) -> "Counts":
        """Count one round, by the class's rule for texts that end inside an accepted block.

        `draft` is a tree, or a chain's length. `emitted` tokens entered the text: `accepted` + 1, or fewer at its end.
        """
        tree = Tree.chain(draft) if isinstance(draft, int) else draft
        accepted = min(accepted, emitted)
        depth = tree.depth if emitted > accepted else emitted  # positions past the text's end do not count
        return cls(
            num_drafts=1,
            num_draft_tokens=sum(d <= depth for d in tree.depths),
            num_accepted_tokens=accepted,
            num_accepted_tokens_per_pos=(1,) * accepted + (0,) * (depth - accepted),
            num_draft_tokens_per_pos=(1,) * depth,
            num_reached_per_pos=tuple(int(i <= accepted) for i in range(depth)),
            num_emitted_tokens=emitted,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Counts":
        """Return the counts that `to_dict` wrote."""
        counts: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**counts)

    @classmethod
    def total(cls, counts: Iterable["Counts"]) -> "Counts":
        """Return the field-by-field sum; for many rounds it is far faster than repeated addition."""
        terms = [cls(), *counts]
        return cls(*(_total([getattr(term, name) for term in terms]) for name in NAMES))

    def __add__(self, other: "Counts") -> "Counts":
        return Counts.total([self, other])

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain JSON types."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}


NAMES = tuple(field.name for field in fields(Counts))


def possible(counts: Counts) -> Counts:
    """Return the counts; a ValueError says why no decoder can have produced them.

    A server whose drafts differ in length does not say how many reached a position.
    """
    positions = zip_longest(
        counts.num_accepted_tokens_per_pos, counts.num_reached_per_pos, counts.num_draft_tokens_per_pos, fillvalue=0
    )
    accepted = counts.num_accepted_tokens
    if sum(counts.num_accepted_tokens_per_pos) != accepted or accepted > counts.num_draft_tokens:
        raise ValueError(f"expected as many accepted tokens as all positions have, found {accepted}")
    if counts.num_reached_per_pos and not all(
        a <= reached <= drafted <= counts.num_drafts for a, reached, drafted in positions
    ):
        raise ValueError("expected no more accepted than reached, reached than drafted, and drafted than rounds")
    return counts


def _total(values: Sequence[Any]) -> Any:
    """Add numbers, or tuples entry by entry with zeros for missing entries."""
    return tuple(map(sum, zip_longest(*values, fillvalue=0))) if isinstance(values[0], tuple) else sum(values)


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
