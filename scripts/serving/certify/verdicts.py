"""Verdicts on a server's texts: the comparison at T=0, and the tests of sampled text."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement import LEAST_TOKENS
from draftsmith.decode.measurement.certificate import Certificate, certify_greedy, tie_tolerant_test
from draftsmith.decode.measurement.distribution_test import plain_texts
from draftsmith.decode.measurement.exactness import first_difference
from draftsmith.decode.measurement.two_samples import two_sample_tests
from draftsmith.scripts.serving.certify.collect import text_pairs
from draftsmith.scripts.serving.certify.config import CertifyConfig
from draftsmith.train.endpoint.client import SentPrompt
from draftsmith.train.kinds.drafter import Pair

Texts = Sequence[tuple[list[int], str]]
"""Token ids and why each text ended, in the order of their indices."""
BATCH = 16
MOST_NAMED = 3


@dataclass(frozen=True)
class SampledVerdict:
    """Results of the tests at one temperature above 0."""

    temperature: float
    texts: int
    tokens: int
    distinct: int
    """Different texts of the same prompt, summed over the prompts."""
    p_value: float
    """The least p-value times the number of tests; 0 if a token is impossible or a text passes its end."""
    threshold: float
    impossible: int | None
    """Tokens of probability zero under the target; None without it."""
    overrun: int
    """Texts that continue after an end-of-sequence token, or past the requested tokens."""
    tests: Mapping[str, Mapping[str, Any]]
    reason: str | None

    @property
    def passed(self) -> bool:
        """True if the texts pass as the target's."""
        return self.p_value > self.threshold


@dataclass(frozen=True)
class GreedyVerdict:
    """Results of the comparison at T=0."""

    first: Certificate
    """Certificate of the server's first texts against plain decoding's."""
    again: Certificate | None
    """Certificate of its repeated texts against its first ones; None without repetition."""
    plain_again: Certificate | None
    """The same for the plain server. It decides nothing, but limits the near-ties allowed."""

    @property
    def passed(self) -> bool:
        """True if all texts of the server are the target's."""
        return all(bool(certificate.passed) for certificate in (self.first, self.again) if certificate is not None)


@dataclass(frozen=True)
class Judge:
    """The judge of texts that answer prompts; `pair` is the target and maybe a draft, if they are here."""

    config: CertifyConfig
    pair: Pair | None
    questions: Sequence[SentPrompt]
    ends: Sequence[int]

    def require(self) -> None:
        """Raise InputError if the target has to decode here and cannot, before any text is requested."""
        if self.pair is not None and self.config.plain_server is None and 0 in self.config.temperature:
            plain_texts(self.pair.target, _on([torch.tensor(self.questions[0].ids)], self.pair), max_new_tokens=1)

    def greedy(self, texts: Texts, plain: Texts | None) -> GreedyVerdict:
        """Compare a server's texts at T=0 with plain ones, and repeated texts with the first.

        `texts` are one per prompt and, with `repeat`, one more of each; `plain` are the plain server's, or None to
        decode here. Without the target no difference can pass as a tie.
        """
        count, again, plain_again, ties = len(self.questions), None, None, 0
        if self.config.repeat and plain is not None:
            plain_again = self._compare(plain[count:], plain[:count])
            ties = plain_again.near_ties or 0
        first = self._compare(texts[:count], plain and plain[:count], ties)
        if self.config.repeat:
            again = self._compare(texts[count:], texts[:count], ties)
        return GreedyVerdict(first, again, plain_again)

    def _compare(self, answers: Texts, plain: Texts | None, plain_ties: int = 0) -> Certificate:
        """Compare a text of each prompt with another; `plain` None compares with texts decoded here."""
        texts, expected = ([_with_end(*text, self.ends) for text in group or []] for group in (answers, plain))
        if self.pair is None:
            return _compared(texts, expected)
        target, prompts = self.pair.target, _on([torch.tensor(prompt.ids) for prompt in self.questions], self.pair)
        if plain is None:
            # Penalties change what T=0 writes; temperature and top-k do not.
            options = {name: getattr(self.config, name) for name in ("repetition_penalty", "max_new_tokens")}
            decoded = plain_texts(target, prompts, batch_size=8, **options)
            expected = [text[len(prompt) :].tolist() for text, prompt in zip(decoded, prompts, strict=True)]
        sampler = self.config.at(0).sampler().on(target.device)
        return certify_greedy(target, expected, texts, prompts, sampler, False, plain_ties)

    def sampled(self, temperature: float, answers: Texts, plain: Texts | None) -> SampledVerdict:
        """Test whether sampled texts have the target's distribution; without the target, the plain server's (`plain`).

        Raise InputError for texts that ended too early to hold enough tokens.
        """
        config = self.config
        whole = [_with_end(*text, self.ends) for text in answers]
        stops = [next((i for i, token in enumerate(tokens, 1) if token in self.ends), None) for tokens in whole]
        texts = [tokens[:stop][: config.max_new_tokens] for tokens, stop in zip(whole, stops, strict=True)]
        overrun = sum(len(tokens) > len(text) for tokens, text in zip(whole, texts, strict=True))
        count = len(self.questions)
        prompts = [i // 2 % count for i in range(len(texts))]
        if self.pair is not None:
            p_value, tests, impossible, reason = self._by_target(self.pair, temperature, texts, prompts)
        else:
            # The texts of each prompt, of the server and of the plain server.
            first, second = (
                [[text for text, prompt in zip(group, prompts, strict=True) if prompt == i] for i in range(count)]
                for group in (texts, [tokens for tokens, _ in plain or []])
            )
            compared = two_sample_tests(first, second, config.level / 2, config.seed)
            name, least = min(compared.items(), key=lambda item: item[1].p_value)
            p_value, impossible = min(1.0, len(compared) * least.p_value), None
            tests = {name: asdict(test) for name, test in compared.items()}
            reason = f"its texts are not the plain server's: {name}, {least}"
        if overrun:
            p_value, reason = 0.0, f"{overrun} texts continue after their end"
        return SampledVerdict(
            temperature,
            texts=len(texts),
            tokens=sum(map(len, texts)),
            distinct=len({(prompt, *text) for prompt, text in zip(prompts, texts, strict=True)}),
            p_value=p_value,
            threshold=config.level,
            impossible=impossible,
            overrun=overrun,
            tests=tests,
            reason=None if p_value > config.level else reason,
        )

    def _by_target(
        self, pair: Pair, temperature: float, texts: Sequence[list[int]], prompts: Sequence[int]
    ) -> tuple[float, dict[str, dict[str, Any]], int, str]:
        """Return the p-value, the tests, the number of impossible tokens, and the worst test in words."""
        tokens = sum(map(len, texts))
        if tokens < LEAST_TOKENS:
            raise InputError(
                f"sampled_tokens: expected texts of at least {LEAST_TOKENS} tokens in all, found {tokens}, for they "
                "end early: ask for more, into another --output"
            )
        target, sampler = pair.target, self.config.at(temperature).sampler().on(pair.target.device)
        drafter = pair.drafters[0].proposer.distributions_after(target, sampler) if pair.drafters else None
        ids = [self.questions[prompt].ids or [] for prompt in prompts]
        written = [
            (torch.tensor([*prompt, *text], device=target.device), len(prompt))
            for prompt, text in zip(ids, texts, strict=True)
        ]
        result = tie_tolerant_test(target, written, sampler, drafter, self.config.seed, BATCH, text_pairs(len(texts)))
        tests, reason = {name: asdict(test) for name, test in result.tests.items()}, result.worst()
        if result.impossible:
            text, index = result.impossible[0]
            token = int(written[text][0][index])
            reason += f", the first in text {text}, token {index - written[text][1]}: {token}"
        return result.p_value, tests, result.num_impossible, reason


def _with_end(tokens: list[int], reason: str, ends: Sequence[int]) -> list[int]:
    """Return a text with its end-of-sequence token, which some servers leave out."""
    return [*tokens, ends[0]] if reason == "stop" and ends and not set(ends) & set(tokens) else tokens


def _compared(texts: Sequence[list[int]], plain: Sequence[list[int]]) -> Certificate:
    """Compare texts without the target, which could tell a tie from a mistake."""
    indices = {}
    for i, (text, expected) in enumerate(zip(texts, plain, strict=True)):
        position = first_difference(text, expected)
        if position is not None:
            indices[i] = position
    named = " | ".join(f"prompt {i}, token {position}" for i, position in list(indices.items())[:MOST_NAMED])
    reason = f"{len(indices)} texts differ: {named}; whether these are ties, the target (--target) would tell"
    return Certificate(
        identical=not indices,
        prompts_identical=len(texts) - len(indices),
        departures=len(indices),
        passed=not indices,
        reason=reason if indices else None,
    )


def _on(prompts: Sequence[Tensor], pair: Pair) -> list[Tensor]:
    return [prompt.to(pair.target.device) for prompt in prompts]
