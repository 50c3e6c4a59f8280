"""Requests to a server at a concurrency, with the time of each part of an answer."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.scripts.engines.client import Engine, ServerMetrics, identify_engine, metrics_of
from draftsmith.scripts.measure.server.config import MeasureServerConfig
from draftsmith.train.endpoint.client import Client, SentPrompt, ServedCompletion, completion_request, request_seed
from draftsmith.train.endpoint.http import ServerFailure
from draftsmith.train.endpoint.retries import Window, ask_all


@dataclass(frozen=True)
class RequestRecord:
    """One request and its answer. Times are in seconds since it was sent.

    `prompt` is the prompt's index, `tokens` the completion's number as the server counts it, and `first` and `last` are
    the times of the first and last part (None for an empty answer). Servers may give no ids, and then `text` is set.
    """

    prompt: int
    tokens: int
    first: float | None
    last: float | None
    ended: float
    parts: list[int]
    """Tokens of each part; zeros if the server gives no ids."""
    finish_reason: str | None
    prompt_ids: list[int] | None
    token_ids: list[int] | None
    text: str | None
    counts: ServerCounts | None
    """The server's counts of this answer, if it gives them."""


@dataclass
class MeasuredServer:
    """One server, and what it says of itself; `before` is the last reading of its metrics."""

    client: Client
    engine: Engine
    model: str
    length: int | None
    """The most tokens of a text there, its prompt included; None if the server does not say."""
    config: MeasureServerConfig
    before: ServerMetrics | None = None

    @classmethod
    async def opened(cls, client: Client, config: MeasureServerConfig) -> "MeasuredServer":
        """Return a server that answers, has metrics and lists the model; raise InputError if it does not."""
        try:
            engine = await identify_engine(client)
            model = await client.model(config.model)
            door = cls(client, engine, model, (await client.models()).get(model), config)
            await door.metrics()
        except ServerFailure as error:  # before anything is measured, the URL is the likely mistake
            raise InputError(str(error)) from error
        return door

    async def metrics(self) -> ServerMetrics:
        """Return the server's metrics; zeros for an SGLang that was started without them: its answers have counts."""
        try:
            return await metrics_of(self.client)
        except InputError:
            if self.engine.kind != "sglang":
                raise
            return ServerMetrics(ServerCounts(), None, 0)

    def check(self, question: SentPrompt) -> None:
        """Raise InputError unless a prompt of known length and its completion fit the model."""
        needed = 0 if question.ids is None else len(question.ids) + self.config.max_new_tokens
        if self.length is not None and needed > self.length:
            raise InputError(
                f"prompts: expected at most {self.length} tokens, as {self.client.url} allows, of a prompt and its "
                f"{self.config.max_new_tokens} new tokens, found {needed} of prompt {question.prompt.id!r}"
            )


async def records_of(
    door: MeasuredServer, prompts: Mapping[int, SentPrompt], temperature: float, concurrency: int
) -> tuple[list[RequestRecord], float]:
    """Ask one server for completions of prompts by index, `concurrency` at once: the next is sent when one ends.

    Return a record per prompt, in order, and the seconds until the last one ended.

    Raises:
        InputError: a request is refused.
        ServerFailure: one fails; the others are cancelled.
    """
    records, start = dict[int, RequestRecord](), time.perf_counter()
    kind = door.engine.kind

    async def record(index: int) -> None:
        seed = request_seed(prompts[index].prompt.id)
        sent = prompts[index], door.model, door.config, temperature, door.config.max_new_tokens, seed
        body, path = completion_request(*sent, kind, ignore_eos=door.config.ignore_eos)
        records[index] = _record(index, await door.client.complete(body, path, token_ids=kind != "sglang"), door)

    await ask_all(prompts, record, Window(concurrency))
    return [records[index] for index in prompts], time.perf_counter() - start


def _record(index: int, answer: ServedCompletion, door: MeasuredServer) -> RequestRecord:
    tokens = answer.completion_tokens
    if tokens is None:
        tokens = None if answer.token_ids is None else len(answer.token_ids)
    if not tokens:
        content = "none" if tokens is None else "no token"
        raise ServerFailure(f"{door.client.name}: expected tokens and their number in each answer, found {content}")
    first, last = (answer.arrivals[index][0] - answer.sent if answer.arrivals else None for index in (0, -1))
    return RequestRecord(
        prompt=index,
        tokens=tokens,
        first=first,
        last=last,
        ended=answer.ended - answer.sent,
        parts=[count for _, count in answer.arrivals],
        finish_reason=answer.finish_reason,
        prompt_ids=answer.prompt_ids,
        token_ids=answer.token_ids,
        text=(answer.text or "") if answer.token_ids is None else None,
        counts=answer.counts,
    )
