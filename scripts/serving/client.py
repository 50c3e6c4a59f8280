"""A client of an OpenAI-compatible server, vLLM or SGLang: completions as they stream in, and when each part came.

Nothing is sent twice: a request that is tried again would be timed twice, and counted twice by the server.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import httpx2

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.server_counts import ServerCounts, possible
from draftsmith.decode.validation import answered
from draftsmith.scripts.serving.answers import Delta, ModelList, Part
from draftsmith.scripts.serving.counters import Metrics, read_metrics
from draftsmith.train.endpoint.server import MOST_BYTES, api_key, http_client, server_words
from draftsmith.train.options import checked_url

T = TypeVar("T")
REQUESTS = 1024
"""Under way at once, at most."""


class ServerFailure(RuntimeError):
    """A server that did not answer as it should, through no fault of the input: one line that says which and how."""


@dataclass
class Answer:
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
    """What the server counted of this one, if it says: SGLang's `/generate`, and vLLM that was started with
    `--per-request-spec-decode-metrics summary`."""


class Client:
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
        self.name, self.timeout = name, timeout
        self.url = checked_url(url, name)
        self.key = api_key(key_env, f"{name}_key_env")
        self._client = http_client(name, self.key, REQUESTS)

    async def __aenter__(self) -> "Client":
        """Return the client."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close its connections."""
        await self._client.aclose()

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
        listed = await self.get_json(ModelList, "/v1/models")
        return {model.id: model.max_model_len for model in listed.data}

    async def counters(self) -> ServerCounts:
        """Return what the server has counted since its start.

        Raises:
            InputError: it shows no metrics, or none that can be read.
            ServerFailure: it does not answer.
        """
        return (await self.metrics()).counters

    async def metrics(self) -> Metrics:
        """Return what the server says of its speculative decoding and its load; raises as `counters`."""
        return read_metrics(await self.get_text("/metrics"), f"{self.name}: {self.url}/metrics")

    async def get_text(self, path: str) -> str:
        """Return what a path answers with.

        Raises:
            InputError: it is refused (4xx).
            ServerFailure: no answer, or another one than 200.
        """
        async with self._request("GET", path, None) as response:
            return (await whole_body(response)).decode("utf-8", "replace")

    async def get_json(self, kind: type[T], path: str) -> T:
        """Return the JSON that a path answers with.

        Raises as `get_text`, and a `ServerFailure` where it is otherwise than the class `kind` says.
        """
        return self.said(kind, await self.get_text(path), path)

    def said(self, kind: type[T], data: str, path: str) -> T:
        """Return what a path answered, as an instance of a class.

        Raises:
            ServerFailure: it says something else.
        """
        try:
            return answered(kind, data, f"{self.name}: {self.url}{path}", self.key)
        except InputError as error:
            raise ServerFailure(self._hidden(str(error))) from error

    async def complete(
        self, request: Mapping[str, Any], path: str = "/v1/completions", token_ids: bool = True
    ) -> Answer:
        """Return one completion, read as it streams in.

        Args:
            request: the body, as OpenAI's API has it: `model`, `prompt` (ids or a text) or `messages`, `max_tokens`,
                `temperature` and what else shapes the text. How it is sent back is added here: streamed, with its
                usage and, from servers that give them, its tokens' ids.
            path: /v1/completions, or /v1/chat/completions for `messages`.
            token_ids: ask for the tokens' ids; SGLang refuses that of chats that are streamed.

        Raises:
            InputError: the request is refused (4xx).
            ServerFailure: no answer, a broken one, or none within the timeout.
        """
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        stream |= {"return_token_ids": True} if token_ids else {}
        answer, size = Answer(sent=time.perf_counter()), 0
        async for data in self.parts(path, {**request, **stream}):
            size += len(data)
            if size > MOST_BYTES:
                raise _too_long(f"{self.url}{path}")
            self._add(answer, data, path)
            written = max(len(answer.token_ids or []), answer.completion_tokens or 0)
            self.require_room(path, written, request.get("max_tokens"))
        answer.ended = time.perf_counter()
        if answer.finish_reason is None:
            raise self.broken_off(path)
        return answer

    async def parts(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[str]:
        """Give the parts of an answer as they stream in (server-sent events, up to `[DONE]`); raises as `complete`."""
        async with self._request("POST", path, body) as response:
            async for line in _lines(response):
                if line.startswith("data:"):
                    data = line[5:].strip()
                    if data == "[DONE]":
                        return
                    yield data
        raise self.broken_off(path)

    def no_completion(self, path: str, words: str) -> ServerFailure:
        """Return the failure of an answer that is an error, in the server's words."""
        return ServerFailure(f"{self.name}: expected a completion from {self.url}{path}, found {self._hidden(words)}")

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

    def broken_off(self, path: str) -> ServerFailure:
        """Return the failure of an answer that ended too early."""
        return ServerFailure(f"{self.name}: expected a whole answer from {self.url}{path}, found one that breaks off")

    def _add(self, answer: Answer, data: str, path: str) -> None:
        """Add one part of a stream to an answer."""
        now, part = time.perf_counter(), self.said(Part, data, path)
        if part.error is not None:
            raise self.no_completion(path, server_words(data.encode()))
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

    @asynccontextmanager
    async def passed_on(
        self, path: str, content: bytes, headers: Mapping[str, str], connect: float = 5.0
    ) -> AsyncIterator[httpx2.Response]:
        """Give the answer to a request that is somebody else's, whatever its status; none of its body is read yet.

        Args:
            path: where to.
            content: JSON, sent as it is.
            headers: of the request, beside the content's type and the client's key.
            connect: seconds to wait for a connection; the answer has the client's timeout.

        Raises:
            ServerFailure: no answer, one that breaks off while it is read, or none within the timeout.
        """
        where, waits = f"{self.url}{path}", httpx2.Timeout(None, connect=connect)
        asked = self._client.stream(
            "POST", where, content=content, headers={**headers, "Content-Type": "application/json"}, timeout=waits
        )
        async with self._waited_for(where), asked as response:
            yield response

    @asynccontextmanager
    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> AsyncIterator[httpx2.Response]:
        """Give the answer to one request that was accepted; what goes wrong while it is read is told too."""
        where = f"{self.url}{path}"
        async with self._waited_for(where), self._client.stream(method, where, json=body) as response:
            if response.status_code != 200:
                words = server_words(await whole_body(response)) or response.reason_phrase
                self._refuse(response.status_code, where, words)
            yield response

    @asynccontextmanager
    async def _waited_for(self, where: str) -> AsyncIterator[None]:
        """Tell what goes wrong with a request, and end it where it takes too long."""
        try:
            async with asyncio.timeout(self.timeout):
                yield
        except TimeoutError as error:
            raise ServerFailure(
                f"{self.name}: expected an answer from {where}, found none in {self.timeout:g} s"
            ) from error
        except httpx2.RequestError as error:
            found = self._hidden(f"{type(error).__name__} {error}")
            raise ServerFailure(f"{self.name}: expected an answer from {where}, found {found}") from error

    def _refuse(self, status: int, where: str, words: str) -> None:
        line = f"{self.name}: expected an answer from {where}, found {status} {self._hidden(words)}"
        if 400 <= status < 500 and status not in (408, 425, 429):
            raise InputError(line)
        raise ServerFailure(line)

    def _hidden(self, words: str) -> str:
        """Return a server's words on one line, without the key, which some servers repeat."""
        words = words.replace(self.key, "***") if self.key else words  # before it is cut, which may leave half a key
        return " ".join(words.encode("utf-8", "backslashreplace").decode("utf-8").split())[:300]


async def whole_body(response: httpx2.Response) -> bytes:
    """Return an answer's body.

    Raises:
        ServerFailure: it is too long.
    """
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        if len(content) > MOST_BYTES:
            raise _too_long(str(response.url))
    return bytes(content)


async def _lines(response: httpx2.Response) -> AsyncIterator[str]:
    """Give an answer's lines as they come. No other sign ends one: JSON may hold U+2028 and its like as they are."""
    rest = bytearray()
    async for part in response.aiter_bytes():
        rest += part
        if b"\n" in part:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                yield line.decode("utf-8", "replace")
        if len(rest) > MOST_BYTES:
            raise _too_long(str(response.url))
    yield rest.decode("utf-8", "replace")


def _too_long(where: str) -> ServerFailure:
    return ServerFailure(f"{where}: expected an answer of at most {MOST_BYTES} bytes, found more")
