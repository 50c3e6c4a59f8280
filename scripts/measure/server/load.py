"""Requests to a server at a concurrency or a rate, and when the parts of each answer came."""

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
    """A prompt as it is sent: exactly one of ids, a text and messages."""

    prompt: Prompt
    ids: list[int] | None = None
    text: str | None = None
    chat: dict[str, Any] | None = None


@dataclass(frozen=True)
class RequestRecord:
    """One request, as it went. Times are seconds since it was due: sent, or with a rate, arrived."""

    prompt: Count
    """The place of its prompt among those that were read."""
    tokens: Annotated[Count, Field(ge=1)]
    """Of the completion, as the server counts them."""
    sent: Finite
    """How long it waited for one of the requests under way to end; 0 without a rate."""
    first: Finite | None
    """When the first part came; None of an empty answer."""
    last: Finite | None
    ended: Annotated[Amount, Field(gt=0)]
    parts: list[Count]
    """Tokens of each part that came; zeros where the server gives no ids."""
    finish_reason: str | None
    prompt_ids: list[TokenId] | None
    token_ids: list[TokenId] | None
    """As the server gives them, if it does."""
    text: str | None
    """Where it gives no ids."""
    counts: Counted | None
    """The server's counts of this answer, if it gives them."""

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON types."""
        return asdict(self) | {"counts": None if self.counts is None else self.counts.to_dict()}


class AskedServer:
    """One server, and how it is asked."""

    def __init__(self, client: Client, engine: Engine, model: str, length: int | None, config: MeasureServerConfig):
        """Keep what is known of it; `opened` finds it out."""
        self.client, self.engine, self.model, self.length, self.config = client, engine, model, length, config
        self.before: ServerMetrics | None = None
        """Its last reading."""

    @classmethod
    async def opened(cls, client: Client, config: MeasureServerConfig) -> "AskedServer":
        """Return the door of a server that answers, has metrics, and lists the model.

        Raises:
            InputError: it does not.
        """
        try:
            engine = await recognised(client)
            model = await client.model(config.model)
            door = cls(client, engine, model, (await client.models()).get(model), config)
            await door.metrics()
        except ServerFailure as error:  # nothing was measured yet: the URL may be wrong
            raise InputError(str(error)) from error
        return door

    async def metrics(self) -> ServerMetrics:
        """Return what the server counts; nothing of an SGLang without `--enable-metrics`, whose answers are counted.

        Raises:
            InputError: it shows no metrics.
            ServerFailure: it does not answer.
        """
        try:
            return await self.client.metrics()
        except InputError:
            if self.engine.kind != "sglang":
                raise
            return ServerMetrics(ServerCounts(), None, 0, None, None, None)

    def check(self, asked: LoadPrompt) -> None:
        """Require that a prompt of known length and its completion fit the model.

        Raises:
            InputError: they do not.
        """
        needed = 0 if asked.ids is None else len(asked.ids) + self.config.max_new_tokens
        if self.length is not None and needed > self.length:
            raise InputError(
                f"prompts: expected at most {self.length} tokens, as {self.client.url} allows, of a prompt and its "
                f"{self.config.max_new_tokens} new tokens, found {needed} of prompt {asked.prompt.id!r}"
            )

    async def ask(self, asked: LoadPrompt, temperature: float, seed: int) -> StreamedCompletion:
        """Return one completion."""
        config = self.config
        sampling = sampling_fields(config, temperature) | {"ignore_eos": config.ignore_eos}
        if self.engine.kind == "sglang" and asked.chat is None:
            sampling |= {"max_new_tokens": config.max_new_tokens} | ({"sampling_seed": seed} if temperature else {})
            prompt: dict[str, Any] = {"text": asked.text} if asked.ids is None else {"input_ids": asked.ids}
            return await generate(self.client, prompt | {"sampling_params": sampling})
        request = {"model": self.model, "max_tokens": config.max_new_tokens, **sampling}
        request |= {"seed": seed} if temperature else {}
        if asked.chat is None:
            return await self.client.complete(request | {"prompt": asked.text if asked.ids is None else asked.ids})
        return await self.client.complete(
            request | asked.chat, "/v1/chat/completions", token_ids=self.engine.kind != "sglang"
        )


async def ask_all(
    door: AskedServer,
    prompts: Mapping[int, LoadPrompt],
    temperature: float,
    concurrency: int,
    arrivals: Sequence[float] | None = None,
    repeat: int = 0,
) -> tuple[list[RequestRecord], float]:
    """Ask one server for completions of some prompts, `concurrency` at once.

    Args:
        door: the server.
        prompts: by place.
        temperature: of the sampling.
        concurrency: requests under way at once, at most.
        arrivals: when each prompt arrives, in seconds from now; None: the next is sent when one ends.
        repeat: how often they were asked before, for other samples.

    Returns:
        A record a prompt, in order, and the seconds until the last one ended.

    Raises:
        InputError: a request is refused.
        ServerFailure: one fails; the others are cancelled.
    """
    slots = asyncio.Semaphore(concurrency)
    start = time.perf_counter()

    async def one(place: int, asked: LoadPrompt, arrival: float | None) -> RequestRecord:
        await asyncio.sleep(max(start + (arrival or 0.0) - time.perf_counter(), 0.0))
        async with slots:
            seed = request_seed(door.config.seed, asked.prompt.id, repeat)
            answer = await door.ask(asked, temperature, seed)
        return _record(place, answer, answer.sent if arrival is None else start + arrival, door)

    times = [None] * len(prompts) if arrivals is None else arrivals
    tasks = [
        asyncio.create_task(one(place, asked, arrival))
        for (place, asked), arrival in zip(prompts.items(), times, strict=True)
    ]
    try:
        records = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return records, time.perf_counter() - start


def _record(place: int, answer: StreamedCompletion, due: float, door: AskedServer) -> RequestRecord:
    tokens = answer.completion_tokens
    if tokens is None:
        tokens = None if answer.token_ids is None else len(answer.token_ids)
    if not tokens:
        found = "none" if tokens is None else "no token"
        raise ServerFailure(f"{door.client.name}: expected tokens and their number in each answer, found {found}")
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
