"""A client of an OpenAI-compatible server, vLLM or SGLang: completions as they stream in, and when each part came.

Nothing is sent twice: a request that is tried again would be timed twice, and counted twice by the server.
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
    """One completion, as it came."""

    text: str = ""
    prompt_ids: list[int] | None = None
    """The prompt's tokens, if the server gave them."""
    token_ids: list[int] | None = None
    """The completion's tokens, if the server gave them."""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """As the server counts them."""
    sent: float = 0.0
    """When the request went out, in seconds of `time.perf_counter`, as are the others."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When each part came, and its tokens: 0 where the server gave no ids."""
    ended: float = 0.0
    """When the last byte came."""
    counts: ServerCounts | None = None
    """The server's counts of this one, if it gives them: SGLang's `/generate`, and vLLM that was started with
    `--per-request-spec-decode-metrics summary`."""


class Client(HttpClient):
    """Requests to one server; an asynchronous context manager."""

    def __init__(self, url: str, name: str = "server", key_env: str | None = None, timeout: float = 600.0):
        """Nothing is asked yet.

        Args:
            url: the server's root, such as http://127.0.0.1:8000; a trailing /v1 is taken off.
            name: the option that the URL was given by, for messages.
            key_env: the environment variable that holds the API key.
            timeout: seconds to wait for one whole answer.

        Raises:
            InputError: no URL, one with a password or query in it, or no key in the variable.
        """
        super().__init__(checked_url(url, name), name, key_env, timeout)

    async def model(self, named: str | None = None) -> str:
        """Return the name of the model that the server lists, or of the one that is named.

        Raises:
            InputError: it lists none or several, or not the one that is named.
            ServerFailure: it does not answer.
        """
        names = list(await self.models())
        if named is not None:
            if named not in names:
                raise InputError(f"{self.name}: expected a model {named} at {self.url}, found {', '.join(names)}")
            return named
        if len(names) != 1:
            raise InputError(f"{self.name}: expected one model at {self.url}, found {', '.join(names) or 'none'}")
        return names[0]

    async def models(self) -> dict[str, int | None]:
        """Return the models that the server lists, and the tokens that a text of each may have, if it says.

        Raises:
            InputError: it is refused (4xx).
            ServerFailure: it does not answer.
        """
        listed = await self.fetch(ModelList, "/v1/models")
        return {model.id: model.max_model_len for model in listed.data}

    async def counters(self) -> ServerCounts:
        """Return what the server has counted since its start.

        Raises:
            InputError: it shows no metrics, or none that can be read.
            ServerFailure: it does not answer.
        """
        return (await self.metrics()).counters

    async def metrics(self) -> ServerMetrics:
        """Return what the server says of its speculative decoding and its load; raises as `counters`."""
        return read_metrics(await self.get_text("/metrics"), f"{self.name}: {self.url}/metrics")

    async def complete(
        self, request: Mapping[str, Any], path: str = "/v1/completions", token_ids: bool = True
    ) -> StreamedCompletion:
        """Return one completion, read as it streams in.

        Args:
            request: the body, as OpenAI's API has it: `model`, `prompt` (ids or a text) or `messages`, `max_tokens`,
                `temperature` and what else shapes the text. How it is sent back is added here: streamed, with its
                usage and, from servers that give them, its tokens' ids.
            path: /v1/completions, or /v1/chat/completions for `messages`.
            token_ids: ask for the tokens' ids; SGLang refuses that of chats that are streamed. Ids of which some are
                missing are none.

        Raises:
            InputError: the request is refused (4xx).
            ServerFailure: no answer, a broken one, or none within the timeout.
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
            # Servers that parse thinking or calls leave out parts whose text they hold back, and their ids.
            answer.token_ids, answer.arrivals = None, [(time, 0) for time, _ in answer.arrivals]
        return answer

    def impossible(self, path: str, what: str) -> ServerFailure:
        """Return the failure of an answer that says what cannot be."""
        return ServerFailure(f"{self.name}: {self.url}{path}: {what}")

    def require_room(self, path: str, tokens: int, most: int | None) -> None:
        """Require an answer of no more tokens than were asked for.

        Raises:
            ServerFailure: it has more.
        """
        if most is not None and tokens > most:
            raise self.impossible(path, f"expected at most {most} tokens, found {tokens}")

    def _add(self, answer: StreamedCompletion, data: str, path: str) -> None:
        """Add one part of a stream to an answer."""
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
        """Return counts that can be.

        Raises:
            ServerFailure: they cannot.
        """
        try:
            return possible(counts)
        except ValueError as error:
            raise self.impossible(path, str(error)) from error
