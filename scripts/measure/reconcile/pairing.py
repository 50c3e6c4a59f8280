"""A server's answers beside the texts that a report expects of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.exactness import first_difference
from draftsmith.decode.measurement.intervals import LEAST
from draftsmith.decode.measurement.server_counts import VLLM, Convention, ServerCounts, vllm_counts
from draftsmith.scripts.measure.reconcile.rounds import ExpectedText, RoundsSettings
from draftsmith.scripts.report.types import Verifier

SPACING = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Of the numbers of a half precision, just above 1."""
ROUNDING = 2.0
"""Units in the last place by which rounding moves the margin of two tokens: seen on the embedded target in bfloat16."""


@dataclass(frozen=True)
class ServedText:
    """One answer of the server."""

    prompt: str
    """The prompt's id."""
    tokens: int
    """Of the answer."""
    prompt_ids: Sequence[int] | None
    """The prompt's tokens, as the server had them; None where it does not say."""
    token_ids: Sequence[int] | None
    """The answer's."""
    parts: Sequence[int]
    """Tokens of each part that it came in; empty where they are no steps."""
    counts: ServerCounts | None
    """The server's counts of this answer, if they are known."""


@dataclass(frozen=True)
class ServedSetting:
    """The part of a report that a server is compared with."""

    drafter: str
    """Its name in the report."""
    verifier: Verifier
    temperature: float
    draft_length: int
    """γ, as the server drafts."""
    concurrency: int = 1
    """Requests under way at once."""
    room: int | None = None
    """Tokens that the server's context has, prompts included; None where it does not say."""
    convention: Convention = VLLM
    """How it counts."""


@dataclass(frozen=True)
class Pairing:
    """Answers beside the texts that are expected of them, in the server's order."""

    asked: ServedSetting
    served: Sequence[ServedText]
    expected: Sequence[ExpectedText]
    plain: Sequence[ServedText | None]
    """Answers of a server without speculation."""
    tie: float | None = None
    """By how much of the largest logit a token may be ahead of the next one where rounding decides between them; None
    where the report's arithmetic is so fine that texts and counts must be equal."""

    def expected_counts(self, drafter: str, verifier: Verifier) -> list[ServerCounts] | None:
        """Return what a server with a drafter must count of each expected text; None where that is not known."""
        counts = []
        for text in self.expected:
            a_TK = text.acceptance(drafter, verifier, self.asked.draft_length)
            if a_TK is None:
                return None
            counts.append(self.counts(text, a_TK, text.lengths(drafter)))
        return counts

    def counts(
        self, text: ExpectedText, acceptance_TK: np.ndarray, drafted_T: np.ndarray | None = None
    ) -> ServerCounts:
        """Return what a server counts of a text, given the acceptance of its rounds, and their lengths if not γ."""
        room = None if self.asked.room is None else self.asked.room - len(text.prompt_ids)
        return vllm_counts(acceptance_TK, text.length, self.asked.draft_length, room, drafted_T, self.asked.convention)

    @cached_property
    def prompt_departures(self) -> dict[int, int]:
        """Where the server's prompt first differs, by place."""
        return {
            place: at
            for place, (one, text) in enumerate(zip(self.served, self.expected, strict=True))
            if one.prompt_ids is not None and (at := first_difference(text.prompt_ids, one.prompt_ids)) is not None
        }

    @cached_property
    def other_texts(self) -> dict[int, int]:
        """Where the server's text first differs, by place."""
        return {
            place: at
            for place, (one, text) in enumerate(zip(self.served, self.expected, strict=True))
            if one.token_ids is not None
            and (at := first_difference(text.tokens[: text.length], one.token_ids)) is not None
        }

    @cached_property
    def near_ties(self) -> set[int]:
        """The places of texts that first differ where rounding decides."""
        if self.tie is None:
            return set()
        margins = {place: self.margin(place, at) for place, at in self.other_texts.items()}
        return {place for place, margin in margins.items() if margin is not None and margin <= self.tie}

    @cached_property
    def text_departures(self) -> dict[int, int]:
        """Where the server's text first differs, by place, if rounding does not explain it."""
        return {place: at for place, at in self.other_texts.items() if place not in self.near_ties}

    def margin(self, place: int, at: int) -> float | None:
        """Return by how much of the largest logit an expected token is ahead; None where the text ends, or unknown."""
        margins = self.expected[place].margins
        return margins[at] if margins is not None and at < len(margins) else None

    @cached_property
    def known_texts(self) -> bool:
        """Whether the server gave the tokens of all answers."""
        return all(one.token_ids is not None for one in self.served)


def paired(
    settings: RoundsSettings,
    texts: Sequence[ExpectedText],
    asked: ServedSetting,
    served: Sequence[ServedText],
    plain: Sequence[ServedText] = (),
) -> Pairing:
    """Put each answer beside its expected text. Arguments and errors are those of `reconcile`."""
    expected = texts_of(texts, asked.temperature, [one.prompt for one in served])
    if asked.drafter not in settings.drafters:
        raise InputError(
            f"drafter: expected one of the report's, {', '.join(settings.drafters)}, found {asked.drafter!r}"
        )
    if asked.draft_length > settings.draft_length:
        raise InputError(
            f"expect: expected a report of rounds of up to {asked.draft_length} tokens, which the server drafts, found "
            f"{settings.draft_length}; measure again with --draft_length {asked.draft_length}"
        )
    if any(text.acceptance(asked.drafter, asked.verifier, asked.draft_length) is None for text in expected):
        raise InputError(
            f"expect: expected the rounds of {asked.drafter} ({asked.verifier}) with {asked.draft_length} tokens, "
            "found none: trees under sampling, n-grams and more tokens than heads are not replayed"
        )
    by_prompt = {one.prompt: one for one in plain}
    tie = ROUNDING * SPACING[settings.dtype] if settings.dtype in SPACING else None
    return Pairing(asked, served, expected, [by_prompt.get(one.prompt) for one in served], tie)


def texts_of(texts: Sequence[ExpectedText], temperature: float, prompts: Sequence[str]) -> list[ExpectedText]:
    """Return the text that a report expects of each prompt at a temperature.

    Raises:
        InputError: the report has none of that temperature, or none of some prompts.
    """
    known = {text.prompt: text for text in texts if text.temperature == temperature}
    if not known:
        there = ", ".join(f"{t:g}" for t in sorted({text.temperature for text in texts}))
        raise InputError(f"expect: expected a report of T = {temperature:g}, found T = {there or 'none'}")
    asked = dict.fromkeys(prompts)
    lacking = [prompt for prompt in asked if prompt not in known]
    if lacking:
        raise InputError(
            f"expect: expected a report of the same prompts, found none of {len(lacking)} of {len(asked)} prompts at "
            f"T = {temperature:g}, first of prompt {lacking[0]!r}"
        )
    return [known[prompt] for prompt in prompts]


def too_few(answers: int) -> InputError:
    """Return the error of too few answers for an interval."""
    return InputError(f"expect: expected answers to at least {LEAST} prompts, as an interval needs, found {answers}")
