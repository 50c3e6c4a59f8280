"""A client of an OpenAI-compatible server, vLLM or SGLang, that records when each part of a completion came.

Nothing is sent twice: a retry would be timed twice, and counted twice by the server.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.server_counts import ServerCounts, possible
from draftsmith.scripts.serving.counters import ServerMetrics, read_metrics
from draftsmith.train.endpoint.answers import Delta, ModelList, StreamPart, whole_ids
from draftsmith.train.endpoint.http import MOST_BYTES, HttpClient, ServerFailure, server_words
from draftsmith.train.options import checked_url


@dataclass
class StreamedCompletion:
    """One completion and its times, in seconds of `time.perf_counter`: sent, when each part came, ended.

    Ids are None if the server gave none. `completion_tokens` is the server's count.
    """

    text: str = ""
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    sent: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Time and tokens of each part; 0 tokens if the server gave no ids."""
    ended: float = 0.0
    counts: ServerCounts | None = None
    """The server's counts of this completion, if it gives them: SGLang's `/generate` does, and vLLM started with
    `--per-request-spec-decode-metrics summary`."""


class Client(HttpClient):
    """Requests to one server; an asynchronous context manager.

    Its methods raise InputError for a refused request (4xx) or an unusable server, and ServerFailure for no answer, a
    broken one, or none within the timeout.
    """

    def __init__(self, url: str, name: str = "server", key_env: str | None = None, timeout: float = 600.0):
        """Check the URL, without requests; `name` is the option that gave it.

        A trailing /v1 is removed. `key_env` is the environment variable of the API key; `timeout` is in seconds per
        answer.
        """
        super().__init__(checked_url(url, name), name, key_env, timeout)

    async def model(self, named: str | None = None) -> str:
        """Return the name of the only model that the server lists, or `named` if it is listed."""
        names = list(await self.models())
        if named is not None:
            if named not in names:
                raise InputError(f"{self.name}: expected a model {named} at {self.url}, found {', '.join(names)}")
            return named
        if len(names) != 1:
            raise InputError(f"{self.name}: expected one model at {self.url}, found {', '.join(names) or 'none'}")
        return names[0]

    async def models(self) -> dict[str, int | None]:
        """Return the listed models, and the most tokens of a text of each, if known."""
        listed = await self.fetch(ModelList, "/v1/models")
        return {model.id: model.max_model_len for model in listed.data}

    async def counters(self) -> ServerCounts:
        """Return the server's counts since its start."""
        return (await self.metrics()).counters

    async def metrics(self) -> ServerMetrics:
        """Return the server's metrics of speculative decoding and load."""
        return read_metrics(await self.get_text("/metrics"), f"{self.name}: {self.url}/metrics")

    async def complete(
        self, request: Mapping[str, Any], path: str = "/v1/completions", token_ids: bool = True
    ) -> StreamedCompletion:
        """Return one completion, read as it streams in.

        `request` is the body of OpenAI's API, and `path` /v1/completions, or /v1/chat/completions for `messages`.
        Streaming, usage and ids are requested here. `token_ids` requests ids, which SGLang refuses for streamed chats;
        ids of which some are missing are dropped.
        """
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        stream |= {"return_token_ids": True} if token_ids else {}
        answer, size = StreamedCompletion(sent=time.perf_counter()), 0
        async for data in self.events(path, {**request, **stream}):
            size += len(data)
            if size > MOST_BYTES:
                raise self.too_long(f"{self.url}{path}")
            self._add(answer, data, path)
            written = max(len(answer.token_ids or []), answer.completion_tokens or 0)
            self.require_room(path, written, request.get("max_tokens"))
        answer.ended = time.perf_counter()
        if answer.finish_reason is None:
            raise self.broken_off(path)
        if not whole_ids(answer.token_ids, answer.completion_tokens, answer.finish_reason):
            # Servers that parse thinking or tool calls hold back parts of the text, and lose their ids.
            answer.token_ids, answer.arrivals = None, [(time, 0) for time, _ in answer.arrivals]
        return answer

    def impossible(self, path: str, what: str) -> ServerFailure:
        """Return the failure of an answer with impossible values."""
        return ServerFailure(f"{self.name}: {self.url}{path}: {what}")

    def require_room(self, path: str, tokens: int, most: int | None) -> None:
        """Raise ServerFailure if an answer has more tokens than requested."""
        if most is not None and tokens > most:
            raise self.impossible(path, f"expected at most {most} tokens, found {tokens}")

    def _add(self, answer: StreamedCompletion, data: str, path: str) -> None:
        now, part = time.perf_counter(), self.read(StreamPart, data, path)
        if part.error is not None:
            raise self.failure("a completion", f"{self.url}{path}", server_words(data.encode()))
        for choice in part.choices or ():
            delta, ids = choice.delta or Delta(), choice.token_ids
            text = choice.text or delta.text
            answer.text += text
            answer.prompt_ids = choice.prompt_token_ids or part.prompt_token_ids or answer.prompt_ids
            if ids is not None:
                answer.token_ids = [*(answer.token_ids or []), *ids]
            if ids or text:
                answer.arrivals.append((now, len(ids or [])))
            answer.finish_reason = choice.finish_reason or answer.finish_reason
        if part.usage is not None:
            usage = part.usage
            answer.prompt_tokens = answer.prompt_tokens if usage.prompt_tokens is None else usage.prompt_tokens
            if usage.completion_tokens is not None:
                answer.completion_tokens = usage.completion_tokens
        if part.metrics is not None and part.metrics.speculative_decoding is not None:  # in the last part
            counted = part.metrics.speculative_decoding
            counts = ServerCounts.of_histogram(counted.acceptance_histogram, counted.num_draft_tokens)
            answer.counts = self.counted(path, counts)

    def counted(self, path: str, counts: ServerCounts) -> ServerCounts:
        """Return the counts; raise ServerFailure if they are impossible."""
        try:
            return possible(counts)
        except ValueError as error:
            raise self.impossible(path, str(error)) from error
