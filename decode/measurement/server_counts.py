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

from collections.abc import Callable, Sequence
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

    def mean_acceptance_length(self) -> float | None:
        """Return 1 + accepted ÷ drafts, as vLLM's log has it; None where nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

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
    if accepted > drafted or (per_pos and sum(per_pos) > accepted):
        raise ValueError(
            f"expected at most as many accepted as drafted tokens, found {max(accepted, sum(per_pos))} of {drafted}"
        )
    if any(after > before for before, after in pairwise((drafts, *per_pos))):
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
) -> ServerCounts:
    """Return what vLLM counts, or is expected to count, while it writes one text.

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
    begins[1 if tokens > 1 else 0] = float(tokens > 1)
    drafts, drafted, accepted_K = 0.0, 0.0, np.zeros(draft_length)
    for t in range(1, tokens):
        gamma = draft_length if room is None else max(min(draft_length, room - t - 1), 0)
        if drafted_T is not None:
            gamma = min(gamma, int(drafted_T[t]))
        a_K = acceptance_TK[t, :gamma].astype(np.float64)
        reach_K = np.cumprod(a_K)  # the first j + 1 are accepted
        drafts += begins[t] * (gamma > 0)
        drafted += begins[t] * gamma
        accepted_K[:gamma] += begins[t] * reach_K
        stops_K = np.append(1.0, reach_K) * np.append(1 - a_K, 1.0)  # exactly j are
        begins[t + 1 : t + gamma + 2] += begins[t] * stops_K
    return ServerCounts(float(drafts), float(drafted), float(accepted_K.sum()), tuple(accepted_K.tolist()))


def steps_of(acceptance_TK: np.ndarray, tokens: int, draft_length: int) -> list[int]:
    """Return how many tokens each step of one text emits at T=0, the prompt's among them, as they stream in.

    The last step's are cut where the text ends. Arguments are those of `vllm_counts`, with entries of 0 or 1.
    """
    steps, t = [1] if tokens else [], 1
    while t < tokens:
        row = acceptance_TK[t, :draft_length] < 0.5
        accepted = int(row.argmax()) if row.any() else draft_length
        steps.append(min(accepted + 1, tokens - t))
        t += accepted + 1
    return steps


def pooled(counts: Sequence[ServerCounts]) -> ServerCounts:
    """Return the sum over texts, which is what a server shows."""
    return sum(counts, ServerCounts())
