"""A server's answers paired with the texts that a report expects."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.exactness import first_difference
from draftsmith.decode.measurement.intervals import LEAST
from draftsmith.decode.measurement.server_counts import ServerCounts, vllm_counts
from draftsmith.scripts.report.rounds import ExpectedText, RoundsSettings
from draftsmith.scripts.report.types import Verifier

SPACING = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
"""The spacing of a half precision's numbers just above 1."""
ROUNDING = 2.0
"""Units in the last place by which rounding moves two tokens' margin: seen on the embedded target in bfloat16."""


@dataclass(frozen=True)
class ServedText:
    """One answer of the server. `prompt` is the prompt's id, `tokens` the answer's number."""

    prompt: str
    tokens: int
    prompt_ids: Sequence[int] | None
    """The prompt's tokens as the server had them; None if it does not say."""
    token_ids: Sequence[int] | None
    parts: Sequence[int]
    """Tokens of each part it came in; empty if parts are not steps."""


@dataclass(frozen=True)
class CountedAnswers:
    """Answers that the server counted together: one, or those of a turn, by their indices."""

    answers: Sequence[int]
    counts: ServerCounts


@dataclass(frozen=True)
class ServedSetting:
    """The part of a report that a server is compared with."""

    drafter: str
    verifier: Verifier
    temperature: float
    draft_length: int
    concurrency: int = 1
    room: int | None = None
    """Tokens of the server's context, prompts included; None if it does not say."""
    limit: int | None = None
    """The most tokens of a text where drafts end with them, as in llama.cpp."""


@dataclass(frozen=True)
class Pairing:
    """Answers with the texts that are expected of them, in the server's order."""

    setting: ServedSetting
    served: Sequence[ServedText]
    expected: Sequence[ExpectedText]
    plain: Sequence[ServedText | None]
    """Answers of a server without speculation."""
    tie: float | None = None
    """The margin, as a share of the largest logit, within which rounding decides between two tokens. None if the
    report's arithmetic is fine enough that texts and counts must be equal."""

    def expected_counts(self, drafter: str, verifier: Verifier, past_end: bool = True) -> list[ServerCounts] | None:
        """Return the counts that a drafter must cause for each expected text; None if unknown. See `vllm_counts`."""
        counts = []
        for text in self.expected:
            a_TK = text.acceptance(drafter, verifier, self.setting.draft_length)
            if a_TK is None:
                return None
            context = None if self.setting.room is None else self.setting.room - len(text.prompt_ids)
            room = min((most for most in (context, self.setting.limit) if most is not None), default=None)
            length, drafted_T = self.setting.draft_length, text.lengths(drafter)
            counts.append(vllm_counts(a_TK, text.length, length, room, drafted_T, past_end))
        return counts

    @cached_property
    def prompt_departures(self) -> dict[int, int]:
        """The first differing token of each prompt that differs, by its index."""
        return {
            index: at
            for index, (answer, text) in enumerate(zip(self.served, self.expected, strict=True))
            if answer.prompt_ids is not None
            and (at := first_difference(text.prompt_ids, answer.prompt_ids)) is not None
        }

    @cached_property
    def other_texts(self) -> dict[int, int]:
        """The first differing token of each text that differs, by its index."""
        return {
            index: at
            for index, (answer, text) in enumerate(zip(self.served, self.expected, strict=True))
            if answer.token_ids is not None
            and (at := first_difference(text.tokens[: text.length], answer.token_ids)) is not None
        }

    @cached_property
    def near_ties(self) -> set[int]:
        """The indices of texts whose first difference rounding decides."""
        if self.tie is None:
            return set()
        margins = {index: self.margin(index, at) for index, at in self.other_texts.items()}
        return {index for index, margin in margins.items() if margin is not None and margin <= self.tie}

    @cached_property
    def text_departures(self) -> dict[int, int]:
        """The `other_texts` that rounding does not explain."""
        return {index: at for index, at in self.other_texts.items() if index not in self.near_ties}

    def margin(self, index: int, at: int) -> float | None:
        """Return an expected token's margin as a share of the largest logit; None past the text, or if unknown."""
        margins = self.expected[index].margins
        return margins[at] if margins is not None and at < len(margins) else None


def pair_texts(
    settings: RoundsSettings,
    texts: Sequence[ExpectedText],
    case: ServedSetting,
    served: Sequence[ServedText],
    plain: Sequence[ServedText] = (),
) -> Pairing:
    """Pair each answer with its expected text. Arguments and errors are those of `reconcile`."""
    expected = texts_of(texts, case.temperature, [answer.prompt for answer in served])
    if case.drafter not in settings.drafters:
        raise InputError(
            f"drafter: expected one of the report's, {', '.join(settings.drafters)}, found {case.drafter!r}"
        )
    if case.draft_length > settings.draft_length:
        raise InputError(
            f"expect: expected a report of rounds of up to {case.draft_length} tokens, which the server drafts, found "
            f"{settings.draft_length}; measure again with --draft_length {case.draft_length}"
        )
    if any(text.acceptance(case.drafter, case.verifier, case.draft_length) is None for text in expected):
        raise InputError(
            f"expect: expected the rounds of {case.drafter} ({case.verifier}) with {case.draft_length} tokens, "
            "found none: trees under sampling, n-grams and more tokens than heads are not replayed"
        )
    by_prompt = {answer.prompt: answer for answer in plain}
    tie = ROUNDING * SPACING[settings.dtype] if settings.dtype in SPACING else None
    return Pairing(case, served, expected, [by_prompt.get(answer.prompt) for answer in served], tie)


def texts_of(texts: Sequence[ExpectedText], temperature: float, prompts: Sequence[str]) -> list[ExpectedText]:
    """Return the report's text of each prompt at a temperature, or raise InputError if it lacks some."""
    by_prompt = {text.prompt: text for text in texts if text.temperature == temperature}
    if not by_prompt:
        temperatures = ", ".join(f"{t:g}" for t in sorted({text.temperature for text in texts}))
        raise InputError(f"expect: expected a report of T = {temperature:g}, found T = {temperatures or 'none'}")
    ids = dict.fromkeys(prompts)
    missing = [prompt for prompt in ids if prompt not in by_prompt]
    if missing:
        raise InputError(
            f"expect: expected a report of the same prompts, found none of {len(missing)} of {len(ids)} prompts at "
            f"T = {temperature:g}, first of prompt {missing[0]!r}"
        )
    return [by_prompt[prompt] for prompt in prompts]


def too_few(answers: int) -> InputError:
    """Return the error of too few answers or turns for an interval."""
    needed = f"counts of at least {LEAST} answers or turns, as an interval needs"
    return InputError(f"expect: expected {needed}, found {answers}: ask more prompts")
