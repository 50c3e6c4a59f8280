"""The counts that a server shows of its speculative decoding, computed from the replay of its texts.

Servers count differently from `Counts`, each in its own way, so that equal drafting shows unequal figures. Their
bookkeeping can be computed:

* **vLLM** (0.32, `v1/core/sched/scheduler.py` and `v1/spec_decode/metrics.py`): the first step is the prompt alone. It
  emits a token, drafts nothing, and is no round. Each later step drafts γ tokens, whatever the length limit, and counts
  all that were verified and accepted, those behind an end of text and beyond the limit too.
* **SGLang** (0.5, `srt/managers/schedule_batch.py`): the same rounds, but per request: `spec_verify_ct` steps, out of
  which it shows the mean acceptance length as emitted tokens ÷ steps of each request, and on `/metrics` of the last
  batches.

So a text must be known γ tokens beyond its end. At T=0, where acceptance is 0 or 1, all counts are whole numbers and
the server's own; under sampling they are their expectations.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, starmap, zip_longest
from operator import add, sub
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator

from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import MOST


@dataclass(frozen=True)
class ServerCounts:
    """The counts of a server, or their expectations; the names are vLLM's. Integers where they were counted."""

    num_drafts: int | float = 0
    """Steps of a text that verified a draft."""
    num_draft_tokens: int | float = 0
    num_accepted_tokens: int | float = 0
    num_accepted_tokens_per_pos: tuple[int | float, ...] = ()
    """Steps whose drafted token i was accepted, and so all before it."""

    @classmethod
    def of_histogram(cls, steps: Sequence[int], num_draft_tokens: int) -> "ServerCounts":
        """Return the counts of one text.

        Args:
            steps: how many of its steps accepted 0, 1, 2, … drafted tokens.
            num_draft_tokens: what they drafted together.
        """
        per_pos = [sum(steps[i:]) for i in range(1, len(steps))]
        return cls(sum(steps), num_draft_tokens, sum(per_pos), tuple(per_pos))

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain JSON types."""
        return asdict(self) | {"num_accepted_tokens_per_pos": list(self.num_accepted_tokens_per_pos)}

    def __add__(self, other: "ServerCounts") -> "ServerCounts":
        return self._with(other, add)

    def __sub__(self, earlier: "ServerCounts") -> "ServerCounts":
        return self._with(earlier, sub)

    def same_as(self, other: "ServerCounts") -> bool:
        """Return whether these are the same integers; a position where nothing was accepted may be listed or not."""
        less = self - other
        numbers = less.num_drafts, less.num_draft_tokens, less.num_accepted_tokens, *less.num_accepted_tokens_per_pos
        return not any(map(round, numbers))

    def draft_acceptance_rate(self) -> float | None:
        """Return accepted ÷ drafted tokens; None where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    def acceptance_per_position(self) -> list[float]:
        """Return, for each position, the steps that accepted it ÷ all steps, as vLLM's log has it."""
        return [accepted / self.num_drafts for accepted in self.num_accepted_tokens_per_pos if self.num_drafts]

    def _with(self, other: "ServerCounts", operation: Callable[[float, float], float]) -> "ServerCounts":
        """Return a sum or a difference, the shorter list of positions filled up with zeros."""
        per_pos = zip_longest(self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos, fillvalue=0)
        return ServerCounts(
            operation(self.num_drafts, other.num_drafts),
            operation(self.num_draft_tokens, other.num_draft_tokens),
            operation(self.num_accepted_tokens, other.num_accepted_tokens),
            tuple(starmap(operation, per_pos)),
        )


@dataclass(frozen=True)
class Convention:
    """How a server counts; by default as vLLM 0.32 does."""

    prompt_drafts: bool = False
    """Whether the step that reads the prompt verifies a draft, too; else it emits a token, and is none of the steps."""
    beyond_end: bool = True
    """Whether tokens that are accepted beyond the end of a text count."""
    bonus: bool = False
    """Whether the token that the target adds to each step counts as accepted."""
    by_batch: bool = False
    """Whether the steps of all texts of a batch count as one."""

    def counted(self, counts: ServerCounts, steps: float, draft_length: int | None) -> ServerCounts | None:
        """Return counts of single texts' steps without the added tokens; None where they cannot be of this convention.

        Args:
            counts: the server's.
            steps: of texts, where it counts those of batches.
            draft_length: γ; None where it varies.
        """
        drafted = counts.num_draft_tokens
        if self.by_batch and draft_length and drafted == draft_length * counts.num_drafts:
            drafted = draft_length * steps
        steps = steps if self.by_batch else counts.num_drafts
        accepted, per_pos = counts.num_accepted_tokens - steps * self.bonus, counts.num_accepted_tokens_per_pos
        depth = len(per_pos) if draft_length is None else draft_length
        if self.bonus and len(per_pos) > depth and per_pos[0] == steps:
            per_pos = per_pos[1:]  # the first of them is the step itself
        if per_pos and (sum(per_pos) != accepted or any(per_pos[depth:]) or per_pos[0] > steps):
            return None
        if accepted < 0 or (self.by_batch and steps < counts.num_drafts):
            return None
        return ServerCounts(steps, drafted, accepted, per_pos)


WORDS = {
    "prompt_drafts": ("the prompt's step drafts too", "the prompt's step drafts nothing"),
    "beyond_end": ("accepted tokens count beyond the end of a text", "accepted tokens count up to the end of a text"),
    "bonus": ("the target's own token counts as accepted", ""),
    "by_batch": ("the steps of a batch count as one", ""),
}
"""Of each field of a convention, what it says if it is true or false."""


VLLM = Convention()


def in_words(conventions: Collection[Convention]) -> str:
    """Return what conventions say in words, and of what they differ in both."""
    said = []
    for name, (yes, no) in WORDS.items():
        values = {getattr(convention, name) for convention in conventions}
        said.append(" or ".join(filter(None, (yes, no or "not"))) if len(values) > 1 else yes if True in values else no)
    return "; ".join(filter(None, said))


def possible(counts: ServerCounts) -> ServerCounts:
    """Return a server's counts if they are possible: whole numbers, no more accepted than drafted.

    Raises:
        ValueError: they are not; says why.
    """
    per_pos = counts.num_accepted_tokens_per_pos
    drafts, drafted, accepted = counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens
    for number in (drafts, drafted, accepted, *per_pos):
        if not 0 <= number <= MOST or number != int(number):
            raise ValueError(f"expected whole numbers of drafts and tokens, found {number}")
    # Some count the target's own token of each step, too, and the steps of a batch as one: texts have as many steps as
    # drafted tokens at most.
    own = drafts <= accepted <= drafted + max(drafts, drafted)
    if (accepted > drafted and not own) or (per_pos and sum(per_pos) > accepted):
        raise ValueError(
            f"expected at most as many accepted as drafted tokens, found {max(accepted, sum(per_pos))} of {drafted}"
        )
    if any(after > before for before, after in pairwise((drafted, *per_pos))):
        raise ValueError(f"expected each position accepted by no more drafts than the one before, found {per_pos}")
    return counts


Counted = Annotated[ServerCounts, AfterValidator(possible)]
"""A server's counts, read from a file."""


def vllm_counts(
    acceptance_TK: np.ndarray,
    tokens: int,
    draft_length: int,
    room: int | None = None,
    drafted_T: np.ndarray | None = None,
    convention: Convention = VLLM,
) -> ServerCounts:
    """Return what a server counts, or is expected to count, while it writes one text.

    Args:
        acceptance_TK: of each token of the text and of γ tokens behind its end, the probability that a round that
            starts there accepts its j-th draft, given that it accepted those before (`TextReplay.rounds`); at T=0 it is
            0 or 1, such as whether the draft is the text's token. (≥ `tokens` + γ − 1, ≥ γ).
        tokens: of the text, those behind its end not counted.
        draft_length: γ, `num_speculative_tokens`.
        room: tokens that the server's context leaves behind the prompt, beyond which it verifies no draft; as many as
            are needed if None.
        drafted_T: of each start the tokens that a round drafts there, where some draft fewer than γ
            (`TextReplay.drafted`); one that drafts nothing is no round.
        convention: how it counts; the target's own tokens are left out.

    Raises:
        InputError: fewer starts or positions than the counts need.
    """
    starts, depth = acceptance_TK.shape
    if starts < tokens + draft_length - 1 or depth < draft_length:
        raise InputError(
            f"acceptance: expected that of {tokens} tokens and {draft_length - 1} behind them at {draft_length} "
            f"positions, found {starts} × {depth}"
        )
    begins = np.zeros(tokens + draft_length + 1)  # the probability that a step starts there
    first = 0 if convention.prompt_drafts else 1
    begins[first] = 1.0
    drafts, drafted, accepted_K = 0.0, 0.0, np.zeros(draft_length)
    for t in range(first, tokens):
        gamma = draft_length if room is None else max(min(draft_length, room - t - 1), 0)
        if drafted_T is not None:
            gamma = min(gamma, int(drafted_T[t]))
        a_K = acceptance_TK[t, :gamma].astype(np.float64)
        reach_K = np.cumprod(a_K)  # the first j + 1 are accepted
        drafts += begins[t] * (gamma > 0)
        drafted += begins[t] * gamma
        counted = gamma if convention.beyond_end else min(gamma, tokens - t)
        accepted_K[:counted] += begins[t] * reach_K[:counted]
        stops_K = np.append(1.0, reach_K) * np.append(1 - a_K, 1.0)  # exactly j are
        begins[t + 1 : t + gamma + 2] += begins[t] * stops_K
    return ServerCounts(float(drafts), float(drafted), float(accepted_K.sum()), tuple(accepted_K.tolist()))


def steps_of(acceptance_TK: np.ndarray, tokens: int, draft_length: int, convention: Convention = VLLM) -> list[int]:
    """Return how many tokens each step of one text emits at T=0, the prompt's among them, as they stream in.

    The last step's are cut where the text ends. Arguments are those of `vllm_counts`, with entries of 0 or 1.
    """
    steps, t = ([], 0) if convention.prompt_drafts or not tokens else ([1], 1)
    while t < tokens:
        row = acceptance_TK[t, :draft_length] < 0.5
        accepted = int(row.argmax()) if row.any() else draft_length
        steps.append(min(accepted + 1, tokens - t))
        t += accepted + 1
    return steps


def pooled(counts: Sequence[ServerCounts]) -> ServerCounts:
    """Return the sum over texts, which is what a server shows."""
    return sum(counts, ServerCounts())
