"""Verdicts on a server's texts: the comparison at T=0, and the tests of sampled text."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement import LEAST_TOKENS
from draftsmith.decode.measurement.certificate import TIES_ALARM, Certificate, certify_greedy, tie_tolerant_test
from draftsmith.decode.measurement.distribution_test import plain_texts
from draftsmith.decode.measurement.exactness import first_difference
from draftsmith.decode.measurement.two_samples import two_sample_test
from draftsmith.scripts.engines.certify.config import CertifyConfig, Texts
from draftsmith.train.endpoint.client import SentPrompt
from draftsmith.train.gguf import turned_margin
from draftsmith.train.kinds.drafter import Pair

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

    def greedy(self, texts: Texts, plain: Texts | None, again: Callable[[], Texts]) -> Certificate:
        """Compare a server's texts at T=0, one per prompt, with plain ones: the plain server's, or None to decode here.

        Without the target no difference can be seen to be a tie. If texts differ, `again` lets the plain server write
        its texts once more: if it departs from itself, the server under test may depart as often, up to chance.
        """
        whole, expected = ([_with_end(*text, self.ends) for text in group or []] for group in (texts, plain))
        if self.pair is None:
            return _compared(whole, expected, again)
        target, prompts = self.pair.target, _on([torch.tensor(prompt.ids) for prompt in self.questions], self.pair)
        if plain is None:
            # Penalties change what T=0 writes; temperature and top-k do not.
            options = {name: getattr(self.config, name) for name in ("repetition_penalty", "max_new_tokens")}
            decoded = plain_texts(target, prompts, batch_size=8, **options)
            expected = [text[len(prompt) :].tolist() for text, prompt in zip(decoded, prompts, strict=True)]
        sampler = self.config.at(0).sampler().on(target.device)
        tie = turned_margin(str(self.config.target))
        return certify_greedy(target, expected, whole, prompts, sampler, same_kernels=False, tie=tie)

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
        prompts = [i % count for i in range(len(texts))]
        if self.pair is not None:
            p_value, tests, impossible, reason = self._by_target(self.pair, temperature, texts, prompts)
        else:
            # The texts of each prompt, of the server and of the plain server.
            first, second = (
                [[text for text, prompt in zip(group, prompts, strict=True) if prompt == i] for i in range(count)]
                for group in (texts, [tokens for tokens, _ in plain or []])
            )
            compared = two_sample_test(first, second, config.level, config.seed)
            p_value, impossible, tests = compared.p_value, None, {"two samples": asdict(compared)}
            reason = f"its texts are not the plain server's: {compared}"
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
        result = tie_tolerant_test(target, written, sampler, drafter, self.config.seed, BATCH)
        tests, reason = {name: asdict(test) for name, test in result.tests.items()}, result.worst()
        if result.impossible:
            text, index = result.impossible[0]
            token = int(written[text][0][index])
            reason += f", the first in text {text}, token {index - written[text][1]}: {token}"
        return result.p_value, tests, result.num_impossible, reason


def _with_end(tokens: list[int], reason: str, ends: Sequence[int]) -> list[int]:
    """Return a text with its end-of-sequence token, which some servers leave out."""
    return [*tokens, ends[0]] if reason == "stop" and ends and not set(ends) & set(tokens) else tokens


def _compared(texts: Sequence[list[int]], plain: Sequence[list[int]], again: Callable[[], Texts]) -> Certificate:
    """Compare texts without the target, which could tell a tie from a mistake."""
    indices = _differing(texts, plain)
    if not indices:
        return Certificate(identical=True, prompts_identical=len(texts), departures=0, passed=True)
    own = len(_differing([tokens for tokens, _ in again()], plain))
    both = own + len(indices)
    # Two servers that round alike depart alike often: a one-sided sign test.
    probability = sum(math.comb(both, k) for k in range(len(indices), both + 1)) / (1 << both)
    named = " | ".join(f"prompt {i}, token {position}" for i, position in list(indices.items())[:MOST_NAMED])
    return Certificate(
        identical=False,
        prompts_identical=len(texts) - len(indices),
        departures=len(indices),
        passed=own > 0 and probability >= TIES_ALARM,
        reason=f"{len(indices)} texts differ: {named}; {own} of the plain server's do when it is asked again; whether "
        "these are ties, the target (--target) would tell",
    )


def _differing(texts: Sequence[list[int]], plain: Sequence[list[int]]) -> dict[int, int]:
    """Return the first differing token of each text that differs."""
    firsts = {i: first_difference(text, expected) for i, (text, expected) in enumerate(zip(texts, plain, strict=True))}
    return {i: position for i, position in firsts.items() if position is not None}


def _on(prompts: Sequence[Tensor], pair: Pair) -> list[Tensor]:
    return [prompt.to(pair.target.device) for prompt in prompts]
