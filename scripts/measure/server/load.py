"""Requests to a server at a concurrency or a rate, with the time of each part of an answer."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import Field

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.server_counts import Counted, ServerCounts
from draftsmith.decode.validation import Amount, Count, Finite, TokenId
from draftsmith.scripts.measure.server.config import MeasureServerConfig
from draftsmith.scripts.serving.client import Client, StreamedCompletion
from draftsmith.scripts.serving.counters import ServerMetrics
from draftsmith.scripts.serving.sglang import Engine, generate, recognised
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.endpoint.http import ServerFailure
from draftsmith.train.endpoint.sampling import request_seed, sampling_fields


@dataclass(frozen=True)
class LoadPrompt:
    """A prompt as it is sent: exactly one of ids, text and chat."""

    prompt: Prompt
    ids: list[int] | None = None
    text: str | None = None
    chat: dict[str, Any] | None = None


@dataclass(frozen=True)
class RequestRecord:
    """One request and its answer. Times are in seconds since it was due: sent, or with a rate, arrived.

    `prompt` is the prompt's index, `tokens` the completion's number as the server counts it, and `first` and `last` are
    the times of the first and last part (None for an empty answer). Servers may give no ids, and then `text` is set.
    """

    prompt: Count
    tokens: Annotated[Count, Field(ge=1)]
    sent: Finite
    """The wait for one of the requests at once to end; 0 without a rate."""
    first: Finite | None
    last: Finite | None
    ended: Annotated[Amount, Field(gt=0)]
    parts: list[Count]
    """Tokens of each part; zeros if the server gives no ids."""
    finish_reason: str | None
    prompt_ids: list[TokenId] | None
    token_ids: list[TokenId] | None
    text: str | None
    counts: Counted | None
    """The server's counts of this answer, if it gives them."""

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON types."""
        return asdict(self) | {"counts": None if self.counts is None else self.counts.to_dict()}


class MeasuredServer:
    """One server, and how it is asked."""

    def __init__(self, client: Client, engine: Engine, model: str, length: int | None, config: MeasureServerConfig):
        """Store the server's facts, which `opened` looks up."""
        self.client, self.engine, self.model, self.length, self.config = client, engine, model, length, config
        self.before: ServerMetrics | None = None
        """The last reading of its metrics."""

    @classmethod
    async def opened(cls, client: Client, config: MeasureServerConfig) -> "MeasuredServer":
        """Return a server that answers, has metrics and lists the model; raise InputError if it does not."""
        try:
            engine = await recognised(client)
            model = await client.model(config.model)
            door = cls(client, engine, model, (await client.models()).get(model), config)
            await door.metrics()
        except ServerFailure as error:  # before anything is measured, the URL is the likely mistake
            raise InputError(str(error)) from error
        return door

    async def metrics(self) -> ServerMetrics:
        """Return the server's metrics; zeros for an SGLang without `--enable-metrics`, whose answers have counts."""
        try:
            return await self.client.metrics()
        except InputError:
            if self.engine.kind != "sglang":
                raise
            return ServerMetrics(ServerCounts(), None, 0, None, None, None)

    def check(self, question: LoadPrompt) -> None:
        """Raise InputError unless a prompt of known length and its completion fit the model."""
        needed = 0 if question.ids is None else len(question.ids) + self.config.max_new_tokens
        if self.length is not None and needed > self.length:
            raise InputError(
                f"prompts: expected at most {self.length} tokens, as {self.client.url} allows, of a prompt and its "
                f"{self.config.max_new_tokens} new tokens, found {needed} of prompt {question.prompt.id!r}"
            )

    async def ask(self, question: LoadPrompt, temperature: float, seed: int) -> StreamedCompletion:
        """Return one completion."""
        config = self.config
        sampling = sampling_fields(config, temperature) | {"ignore_eos": config.ignore_eos}
        if self.engine.kind == "sglang" and question.chat is None:
            sampling |= {"max_new_tokens": config.max_new_tokens} | ({"sampling_seed": seed} if temperature else {})
            prompt: dict[str, Any] = {"text": question.text} if question.ids is None else {"input_ids": question.ids}
            return await generate(self.client, prompt | {"sampling_params": sampling})
        request = {"model": self.model, "max_tokens": config.max_new_tokens, **sampling}
        request |= {"seed": seed} if temperature else {}
        if question.chat is None:
            return await self.client.complete(
                request | {"prompt": question.text if question.ids is None else question.ids}
            )
        ids = self.engine.kind != "sglang"
        return await self.client.complete(request | question.chat, "/v1/chat/completions", token_ids=ids)


async def ask_all(
    door: MeasuredServer,
    prompts: Mapping[int, LoadPrompt],
    temperature: float,
    concurrency: int,
    arrivals: Sequence[float] | None = None,
    repeat: int = 0,
) -> tuple[list[RequestRecord], float]:
    """Ask one server for completions of prompts by index, `concurrency` at once.

    Return a record per prompt, in order, and the seconds until the last one ended. `arrivals` are when the prompts
    arrive, in seconds from now; without them the next is sent when one ends. `repeat` is the number of earlier rounds,
    which had other seeds.

    Raises:
        InputError: a request is refused.
        ServerFailure: one fails; the others are cancelled.
    """
    slots = asyncio.Semaphore(concurrency)
    start = time.perf_counter()

    async def record_of(place: int, question: LoadPrompt, arrival: float | None) -> RequestRecord:
        await asyncio.sleep(max(start + (arrival or 0.0) - time.perf_counter(), 0.0))
        async with slots:
            seed = request_seed(door.config.seed, question.prompt.id, repeat)
            answer = await door.ask(question, temperature, seed)
        # With a rate, latency counts from the arrival: the wait for a free slot is part of it.
        return _record(place, answer, answer.sent if arrival is None else start + arrival, door)

    times = [None] * len(prompts) if arrivals is None else arrivals
    tasks = [
        asyncio.create_task(record_of(place, question, arrival))
        for (place, question), arrival in zip(prompts.items(), times, strict=True)
    ]
    try:
        records = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return records, time.perf_counter() - start


def _record(place: int, answer: StreamedCompletion, due: float, door: MeasuredServer) -> RequestRecord:
    tokens = answer.completion_tokens
    if tokens is None:
        tokens = None if answer.token_ids is None else len(answer.token_ids)
    if not tokens:
        content = "none" if tokens is None else "no token"
        raise ServerFailure(f"{door.client.name}: expected tokens and their number in each answer, found {content}")
    first, last = (answer.arrivals[place][0] - due if answer.arrivals else None for place in (0, -1))
    return RequestRecord(
        prompt=place,
        tokens=tokens,
        sent=answer.sent - due,
        first=first,
        last=last,
        ended=answer.ended - due,
        parts=[count for _, count in answer.arrivals],
        finish_reason=answer.finish_reason,
        prompt_ids=answer.prompt_ids,
        token_ids=answer.token_ids,
        text=answer.text if answer.token_ids is None else None,
        counts=answer.counts,
    )
