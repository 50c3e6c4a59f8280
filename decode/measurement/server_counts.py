"""The counts that a server shows of its speculative decoding, computed from the replay of its texts.

vLLM (0.32, `v1/core/sched/scheduler.py` and `v1/spec_decode/metrics.py`) and SGLang (0.5 with its overlap scheduler,
`srt/managers/scheduler_output_processor_mixin.py`) count alike: the first step is the prompt alone. It emits a token,
drafts nothing, and is no round. Each later step drafts γ tokens and counts all that were verified and accepted,
including those past the end of the text and past the length limit.

A text must therefore be known γ tokens past its end. At T=0 acceptance is 0 or 1, and the computed counts are exactly
the server's; under sampling they are expectations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap, zip_longest
from operator import add, sub
from typing import Annotated

import numpy as np
from pydantic import AfterValidator

from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import MOST


@dataclass(frozen=True)
class ServerCounts:
    """Counts of a server, which are integers, or their expectations; the names are vLLM's."""

    num_drafts: int | float = 0
    """Steps of a text that verified a draft."""
    num_draft_tokens: int | float = 0
    num_accepted_tokens: int | float = 0
    num_accepted_tokens_per_pos: tuple[int | float, ...] = ()
    """Steps that accepted drafted token i, and hence all before it."""

    @classmethod
    def of_histogram(cls, steps: Sequence[int], num_draft_tokens: int) -> "ServerCounts":
        """Return the counts of one text from the numbers of its steps that accepted 0, 1, 2, … drafted tokens."""
        per_pos = [sum(steps[i:]) for i in range(1, len(steps))]
        return cls(sum(steps), num_draft_tokens, sum(per_pos), tuple(per_pos))

    def rounded(self) -> "ServerCounts":
        """Return the counts for a report, without positions at the end that accepted nothing, as some servers list."""
        per_pos = self.num_accepted_tokens_per_pos
        while per_pos and not per_pos[-1]:
            per_pos = per_pos[:-1]
        drafts, drafted, accepted = self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens
        shown = tuple(round(value, 3) for value in per_pos)
        return ServerCounts(round(drafts, 3), round(drafted, 3), round(accepted, 3), shown)

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
        """Return, for each position, the steps that accepted it ÷ all steps, as vLLM logs it."""
        return [accepted / self.num_drafts for accepted in self.num_accepted_tokens_per_pos if self.num_drafts]

    def _with(self, other: "ServerCounts", operation: Callable[[float, float], float]) -> "ServerCounts":
        """Return a sum or a difference; zeros fill the shorter list of positions."""
        per_pos = zip_longest(self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos, fillvalue=0)
        return ServerCounts(
            operation(self.num_drafts, other.num_drafts),
            operation(self.num_draft_tokens, other.num_draft_tokens),
            operation(self.num_accepted_tokens, other.num_accepted_tokens),
            tuple(starmap(operation, per_pos)),
        )


def possible(counts: ServerCounts) -> ServerCounts:
    """Return the counts; raise ValueError unless they are whole numbers with no more accepted than drafted tokens."""
    per_pos = counts.num_accepted_tokens_per_pos
    drafts, drafted, accepted = counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens
    for number in (drafts, drafted, accepted, *per_pos):
        if not 0 <= number <= MOST or number != int(number):
            raise ValueError(f"expected whole numbers of drafts and tokens, found {number}")
    if max(accepted, sum(per_pos)) > drafted or (per_pos and sum(per_pos) > accepted):
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
    past_end: bool = True,
) -> ServerCounts:
    """Return the expected counts of a server that writes one text of `tokens` up to its end.

    `acceptance_TK` is `TextReplay.rounds` of the text and γ tokens past its end, (≥ `tokens` + γ − 1, ≥ γ), 0 or 1 at
    T=0. `room` is the space that the server's context leaves after the prompt, past which it verifies no draft.
    `drafted_T` is `TextReplay.drafted` if some rounds draft fewer than γ; one that drafts nothing is no round. Other
    servers count no acceptance past the end of the text: `past_end` is False.
    """
    starts, depth = acceptance_TK.shape
    if starts < tokens + draft_length - 1 or depth < draft_length:
        raise InputError(
            f"acceptance: expected that of {tokens} tokens and {draft_length - 1} after them at {draft_length} "
            f"positions, found {starts} × {depth}"
        )
    begins = np.zeros(tokens + draft_length + 1)  # the probability that a step starts at each token
    begins[1] = 1.0
    drafts, drafted, accepted_K = 0.0, 0.0, np.zeros(draft_length)
    for t in range(1, tokens):
        gamma = draft_length if room is None else max(min(draft_length, room - t - 1), 0)
        if drafted_T is not None:
            gamma = min(gamma, int(drafted_T[t]))
        a_K = acceptance_TK[t, :gamma].astype(np.float64)
        reach_K = np.cumprod(a_K)  # P(the first j + 1 drafts are accepted)
        drafts += begins[t] * (gamma > 0)
        drafted += begins[t] * gamma
        counted = gamma if past_end else min(gamma, tokens - t)
        accepted_K[:counted] += begins[t] * reach_K[:counted]
        stops_K = np.append(1.0, reach_K) * np.append(1 - a_K, 1.0)  # P(exactly j are accepted)
        begins[t + 1 : t + gamma + 2] += begins[t] * stops_K  # the next step starts after the bonus token
    return ServerCounts(float(drafts), float(drafted), float(accepted_K.sum()), tuple(accepted_K.tolist()))


def steps_of(acceptance_TK: np.ndarray, tokens: int, draft_length: int) -> list[int]:
    """Return the tokens that each step of one text emits at T=0, the prompt's step included; cf. `vllm_counts`."""
    steps, t = ([1], 1) if tokens else ([], 0)
    while t < tokens:
        row = acceptance_TK[t, :draft_length] < 0.5
        accepted = int(row.argmax()) if row.any() else draft_length
        steps.append(min(accepted + 1, tokens - t))
        t += accepted + 1
    return steps


def pooled(counts: Sequence[ServerCounts]) -> ServerCounts:
    """Return the sum over texts."""
    return sum(counts, ServerCounts())
