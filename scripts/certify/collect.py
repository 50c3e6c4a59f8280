"""Texts to ask a server for, and a file of its answers, which outlives a failure."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement import LEAST_TOKENS
from draftsmith.decode.validation import Amount, Count, TokenId, file_bytes, parsed, require_tokens
from draftsmith.scripts.certify.config import CertifyConfig
from draftsmith.scripts.serving.client import Client, StreamedCompletion
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.endpoint.http import ServerFailure
from draftsmith.train.endpoint.sampling import request_seed, sampling_fields

IDS, TEXT, CHAT = "ids", "text", "chat"
FURTHER = 16
"""No more texts are asked for than this times the number that would do if none ended early."""
PATHS = {IDS: "/v1/completions", TEXT: "/v1/completions", CHAT: "/v1/chat/completions"}


@dataclass(frozen=True)
class TextRequest:
    """One text to ask for."""

    temperature: float
    place: int
    """Its place among the texts of its temperature."""
    prompt: int
    """Which prompt it goes on from."""


@dataclass(frozen=True)
class SentPrompt:
    """A prompt as it is sent: its ids where the target's tokenizer is at hand, else its text or its messages."""

    prompt: Prompt
    ids: list[int] | None

    @property
    def kind(self) -> str:
        """How it is sent."""
        if self.ids is not None:
            return IDS
        return TEXT if self.prompt.messages is None else CHAT


def stages(config: CertifyConfig, prompts: int) -> list[list[TextRequest]]:
    """Return what is asked for, in the order in which it is sent; a stage begins when the one before has ended.

    At T=0 each prompt once, and then, with `repeat`, all again in another order: other rows meet, and what servers keep
    of a prompt is there. Above, each prompt twice in a row and then the next one's turn, round and round: rows of the
    same prompt and of others meet, so that what they share shows in either.
    """
    passes = [_passes(config, temperature, prompts) for temperature in config.temperature]
    if not config.mixed:
        return [stage for of in passes for stage in of]
    # Each temperature's queue spread evenly over the whole run.
    queues = [[request for stage in of for request in stage] for of in passes]
    spread = [((i + 0.5) / len(queue), q, request) for q, queue in enumerate(queues) for i, request in enumerate(queue)]
    return [[request for _, _, request in sorted(spread, key=lambda item: item[:2])]]


def _passes(config: CertifyConfig, temperature: float, prompts: int) -> list[list[TextRequest]]:
    """Return what is asked for at one temperature, in one pass or two."""
    if temperature > 0:
        return [[TextRequest(temperature, i, i // 2 % prompts) for i in range(config.texts)]]
    first = [TextRequest(temperature, i, i) for i in range(prompts)]
    order = random.Random(config.seed).sample(range(prompts), prompts)
    return [first, [TextRequest(temperature, prompts + i, i) for i in order]] if config.repeat else [first]


def further(
    config: CertifyConfig, prompts: int, temperature: float, texts: Sequence[tuple[list[int], str]]
) -> list[TextRequest]:
    """Return what is asked for because texts ended early: as many more as hold the least that a test needs.

    Args:
        config: says how many tokens.
        prompts: their number.
        temperature: of the texts.
        texts: that are there.

    Returns:
        None of them where there are tokens enough, or texts so short that more would not help.
    """
    there = sum(len(tokens) for tokens, _ in texts)
    most = FURTHER * config.texts
    lacking = LEAST_TOKENS - there
    if temperature == 0 or lacking <= 0 or len(texts) >= most:
        return []
    wanted = len(texts) + -(-lacking * len(texts) // max(there, len(texts)))
    return [TextRequest(temperature, i, i // 2 % prompts) for i in range(len(texts), min(wanted, most))]


def text_pairs(count: int) -> dict[str, list[tuple[int, int]]]:
    """Return pairs of texts of one temperature that were under way together, by their places: see `stages`."""
    return {
        "rows of the same prompt": [(i, i + 1) for i in range(0, count - 1, 2)],
        "rows of two prompts": [(i, i + 2) for i in range(count - 2) if i % 4 < 2],
    }


LINE: Any = tuple[Amount, Count, list[TokenId], Literal["stop", "length"]]
"""Temperature and place of a text, its tokens, and why it ended."""


class TextStore:
    """The texts that a server has written, a line each in a file: token ids and why each ended."""

    def __init__(self, path: Path, most: int, vocab_size: int | None):
        """Read what an earlier run left; a line that a kill cut off, or that is no text, is asked for again.

        Args:
            path: the file.
            most: tokens of a text.
            vocab_size: what ids must be below; None where it is not known here.
        """
        self._path = path
        self.texts: dict[tuple[float, int], tuple[list[int], str]] = {}
        for line in file_bytes(path).split(b"\n") if path.exists() else []:
            try:
                temperature, place, tokens, reason = parsed(LINE, line, str(path))
            except InputError:
                continue
            if len(tokens) <= most and (vocab_size is None or max(tokens, default=0) < vocab_size):
                self.texts[temperature, place] = tokens, reason

    def add(self, request: TextRequest, tokens: list[int], reason: str) -> None:
        """Write down one text."""
        self.texts[request.temperature, request.place] = tokens, reason
        with self._path.open("a", encoding="utf-8") as file:
            # A new line first: what a kill cut off ends there.
            file.write("\n" + json.dumps([request.temperature, request.place, tokens, reason]))

    def of(self, temperature: float) -> list[tuple[list[int], str]]:
        """Return the texts of a temperature, in the order of their places."""
        return [self.texts[key] for key in sorted(key for key in self.texts if key[0] == temperature)]


async def ask(
    config: CertifyConfig,
    client: Client,
    model: str,
    questions: Sequence[SentPrompt],
    asked: Sequence[TextRequest],
    ends: Sequence[int],
    vocab_size: int | None,
    kept: TextStore,
    finished: Callable[[int], None],
) -> None:
    """Ask a server for the texts that are not stored yet, `concurrency` at once, and store each as it comes.

    Args:
        config: says how texts are sampled, and how many requests are under way.
        client: of the server.
        model: the model's name there.
        questions: the prompts.
        asked: the texts, in the order in which they are sent.
        ends: ids that end a text; none where they are not known here.
        vocab_size: what ids must be below; None where it is not known here.
        kept: the server's texts.
        finished: receives the number of tokens of each text as it comes.

    Raises:
        InputError: the server refuses a request, or answers without token ids.
        ServerFailure: it fails; all other requests are given up.
    """
    window = asyncio.Semaphore(config.concurrency)

    async def one(request: TextRequest) -> None:
        question = questions[request.prompt]
        try:
            body = _body(config, client.name, model, question, request, ends)
            answer = await client.complete(body, PATHS[question.kind])
            tokens = _tokens(config, client, question, answer)
            if vocab_size is not None:
                require_tokens(tokens, vocab_size, f"{client.name}: {client.url}")
            kept.add(request, tokens, answer.finish_reason or "")
            finished(len(tokens))
        finally:
            window.release()

    try:
        async with asyncio.TaskGroup() as group:
            for request in asked:
                if (request.temperature, request.place) not in kept.texts:
                    await window.acquire()
                    group.create_task(one(request))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _body(
    config: CertifyConfig, server: str, model: str, question: SentPrompt, request: TextRequest, ends: Sequence[int]
) -> dict[str, Any]:
    """Return the body that asks for one text."""
    body = {"model": model, "max_tokens": config.max_new_tokens, "skip_special_tokens": False}
    body |= sampling_fields(config, request.temperature)
    if ends:
        body["stop_token_ids"] = list(ends)
    if config.seeded and request.temperature > 0:
        # Each server has seeds of its own, or two of them would draw the same.
        body["seed"] = request_seed(config.seed, server, f"{request.temperature:g}", request.place)
    prompt = question.prompt
    if question.ids is not None:
        return body | {"prompt": question.ids}
    return body | prompt.request(config.system_prompt, config.chat_template_kwargs)


def _tokens(config: CertifyConfig, client: Client, question: SentPrompt, answer: StreamedCompletion) -> list[int]:
    """Return a text's tokens, of an answer that can be judged."""
    where = f"{client.name}: expected"
    if answer.token_ids is None:
        raise InputError(
            f"{where} token ids (return_token_ids, as vLLM and SGLang have it) from {client.url}, as many as its usage "
            "counts, found none or fewer"
        )
    if question.ids is not None and answer.prompt_ids not in (None, question.ids):
        raise InputError(
            f"{where} a text after the prompt's {len(question.ids)} tokens as sent, found that the server changed them"
        )
    if answer.finish_reason not in ("stop", "length"):
        raise ServerFailure(f"{where} a text that ends with stop or length, found {answer.finish_reason!r}")
    if answer.finish_reason == "length" and len(answer.token_ids) < config.max_new_tokens:
        raise InputError(
            f"{where} room for {config.max_new_tokens} tokens behind each prompt, found that prompt "
            f"{question.prompt.id!r} ends after {len(answer.token_ids)}"
        )
    return answer.token_ids
