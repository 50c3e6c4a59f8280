"""Verdicts on a server's texts: the comparison at T=0, and the tests of sampled text."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement import LEAST_TOKENS
from draftsmith.decode.measurement.certificate import Certificate, certify_greedy, texts_tested
from draftsmith.decode.measurement.distribution_test import plain_texts
from draftsmith.decode.measurement.exactness import first_difference
from draftsmith.decode.measurement.two_samples import two_sample_tests
from draftsmith.scripts.certify.collect import SentPrompt, text_pairs
from draftsmith.scripts.certify.config import CertifyConfig
from draftsmith.train.kinds.drafter import Pair

Texts = Sequence[tuple[list[int], str]]
"""Token ids and why each text ended, in the order of their places."""
BATCH = 16
PLACES_NAMED = 3


@dataclass(frozen=True)
class SampledVerdict:
    """Results of the tests at one temperature above 0."""

    temperature: float
    texts: int
    tokens: int
    distinct: int
    """Different texts of the same prompt, summed over the prompts."""
    p_value: float
    """The least of the tests' p-values times their number; 0 where a token is impossible or a text passes its end."""
    threshold: float
    """The p-value must exceed it."""
    impossible: int | None
    """Tokens of probability zero under the target; None without it."""
    overrun: int
    """Texts that go on behind an end-of-sequence token, or beyond the tokens that were asked for."""
    tests: Mapping[str, Mapping[str, Any]]
    reason: str | None
    """The test that failed."""

    @property
    def passed(self) -> bool:
        """Whether the texts pass for the target's."""
        return self.p_value > self.threshold


@dataclass(frozen=True)
class GreedyVerdict:
    """Results of the comparison at T=0."""

    first: Certificate
    """Of the server's first texts, beside plain decoding's."""
    again: Certificate | None
    """Of those that it wrote when it was asked again, beside its own first ones; None where it was not."""
    plain_again: Certificate | None
    """So of the plain server. It decides nothing, but near-ties may be as many as these."""

    @property
    def passed(self) -> bool:
        """Whether all texts of the server are the target's."""
        return all(bool(found.passed) for found in (self.first, self.again) if found is not None)


def require_judge(config: CertifyConfig, pair: Pair | None, questions: Sequence[SentPrompt]) -> None:
    """Require that texts of T=0 can be written here where they have to be, before any is asked for.

    Raises:
        InputError: the target cannot be decoded.
    """
    if pair is not None and config.plain_server is None and 0 in config.temperature:
        plain_texts(pair.target, _on([torch.tensor(questions[0].ids)], pair), max_new_tokens=1)


def judge_greedy(
    config: CertifyConfig,
    pair: Pair | None,
    questions: Sequence[SentPrompt],
    found: Texts,
    plain: Texts | None,
    ends: Sequence[int],
) -> GreedyVerdict:
    """Compare a server's texts at T=0 with the plain server's, or with what the target writes here, and with its own.

    Args:
        config: says how the texts were written.
        pair: the target; without it no difference can pass for a tie.
        questions: the prompts.
        found: the server's texts: one of each prompt and, with `repeat`, once more of each.
        plain: the plain server's, as many; None to decode here.
        ends: ids that end a text.
    """
    count, again, plain_again, ties = len(questions), None, None, 0
    if config.repeat and plain is not None:
        plain_again = _compare(config, pair, questions, plain[count:], plain[:count], ends)
        ties = plain_again.near_ties or 0
    first = _compare(config, pair, questions, found[:count], plain and plain[:count], ends, ties)
    if config.repeat:
        again = _compare(config, pair, questions, found[count:], found[:count], ends, ties)
    return GreedyVerdict(first, again, plain_again)


def _compare(
    config: CertifyConfig,
    pair: Pair | None,
    questions: Sequence[SentPrompt],
    found: Texts,
    plain: Texts | None,
    ends: Sequence[int],
    plain_ties: int = 0,
) -> Certificate:
    """Compare a text of each prompt with another; None for those that the target writes here."""
    texts, plain_ones = ([_with_end(*text, ends) for text in of or []] for of in (found, plain))
    if pair is None:
        return _compared(texts, plain_ones)
    prompts = [torch.tensor(question.ids) for question in questions]
    if plain is None:
        # Penalties change what T=0 writes; temperature and top-k do not.
        options = {name: getattr(config, name) for name in ("repetition_penalty", "max_new_tokens")}
        decoded = plain_texts(pair.target, _on(prompts, pair), batch_size=8, **options)
        expected = [text[len(prompt) :].tolist() for text, prompt in zip(decoded, prompts, strict=True)]
    else:
        expected = plain_ones
    sampler = config.at(0).sampler().on(pair.target.device)
    return certify_greedy(pair.target, expected, texts, _on(prompts, pair), sampler, False, plain_ties)


def judge_sampled(
    config: CertifyConfig,
    pair: Pair | None,
    questions: Sequence[SentPrompt],
    temperature: float,
    found: Texts,
    plain: Texts | None,
    ends: Sequence[int],
) -> SampledVerdict:
    """Test whether sampled texts have the target's distribution; without the target, the plain server's.

    Args:
        config: says how the texts were sampled.
        pair: the target and maybe a draft model.
        questions: the prompts.
        temperature: the one of these texts.
        found: the server's texts.
        plain: the plain server's, where there is no target here.
        ends: ids that end a text.

    Raises:
        InputError: the texts ended so early that they hold too few tokens.
    """
    whole = [_with_end(*text, ends) for text in found]
    texts = [_up_to_end(tokens, ends)[: config.max_new_tokens] for tokens in whole]
    overrun = sum(len(tokens) > len(text) for tokens, text in zip(whole, texts, strict=True))
    asked = [i // 2 % len(questions) for i in range(len(texts))]
    if pair is not None:
        p_value, tests, impossible, reason = _by_target(config, pair, questions, temperature, texts, asked)
    else:
        first, second = (
            [[text for text, prompt in zip(of, asked, strict=True) if prompt == i] for i in range(len(questions))]
            for of in (texts, [tokens for tokens, _ in plain or []])
        )
        compared = two_sample_tests(first, second, config.level / 2, config.seed)
        name, least = min(compared.items(), key=lambda item: item[1].p_value)
        p_value, impossible = min(1.0, len(compared) * least.p_value), None
        tests = {name: asdict(test) for name, test in compared.items()}
        reason = f"its texts are not the plain server's: {name}, {least}"
    if overrun:
        p_value, reason = 0.0, f"{overrun} texts go on behind their end"
    return SampledVerdict(
        temperature,
        len(texts),
        sum(map(len, texts)),
        len({(prompt, *text) for prompt, text in zip(asked, texts, strict=True)}),
        p_value,
        config.level,
        impossible,
        overrun,
        tests,
        None if p_value > config.level else reason,
    )


def _by_target(
    config: CertifyConfig,
    pair: Pair,
    questions: Sequence[SentPrompt],
    temperature: float,
    texts: Sequence[list[int]],
    asked: Sequence[int],
) -> tuple[float, dict[str, dict[str, Any]], int, str]:
    """Return the p-value, the tests, the impossible tokens and what fits least."""
    tokens = sum(map(len, texts))
    if tokens < LEAST_TOKENS:
        raise InputError(
            f"sampled_tokens: expected texts of at least {LEAST_TOKENS} tokens in all, found {tokens}, for they end "
            "early: ask for more, into another --output"
        )
    target, sampler = pair.target, config.at(temperature).sampler().on(pair.target.device)
    drafter = pair.drafters[0].proposer.distributions_after(target, sampler) if pair.drafters else None
    ids = [questions[prompt].ids or [] for prompt in asked]
    written = [
        (torch.tensor([*prompt, *text], device=target.device), len(prompt))
        for prompt, text in zip(ids, texts, strict=True)
    ]
    result = texts_tested(target, written, sampler, drafter, config.seed, BATCH, text_pairs(len(texts)))
    reason = result.worst()
    if result.impossible:
        text, place = result.impossible[0]
        found = int(written[text][0][place])
        reason += f", the first in text {text}, token {place - written[text][1]}: {found}"
    return result.p_value, {name: asdict(test) for name, test in result.tests.items()}, result.num_impossible, reason


def _with_end(tokens: list[int], reason: str, ends: Sequence[int]) -> list[int]:
    """Return a text with its end-of-sequence token, which some servers leave out."""
    return [*tokens, ends[0]] if reason == "stop" and ends and not set(ends) & set(tokens) else tokens


def _up_to_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Return a text without what stands behind its end-of-sequence token."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)


def _compared(found: Sequence[list[int]], plain: Sequence[list[int]]) -> Certificate:
    """Compare texts without the target, which could tell a tie from a mistake."""
    places = {}
    for i, (text, expected) in enumerate(zip(found, plain, strict=True)):
        position = first_difference(text, expected)
        if position is not None:
            places[i] = position
    named = " | ".join(f"prompt {i}, token {position}" for i, position in list(places.items())[:PLACES_NAMED])
    return Certificate(
        identical=not places,
        prompts_identical=len(found) - len(places),
        departures=len(places),
        passed=not places,
        reason=f"{len(places)} texts differ: {named}; whether these are ties, the target (--target) would tell"
        if places
        else None,
    )


def _on(prompts: Sequence[Tensor], pair: Pair) -> list[Tensor]:
    return [prompt.to(pair.target.device) for prompt in prompts]
