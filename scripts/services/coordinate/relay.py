"""Relaying: a request goes to a server, and its answer back as it arrives, unchanged except for the model's name.

If a server fails before the first byte of its answer is out, another one is asked. Later that is impossible: the client
would read the start of one answer and the end of another.
"""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import httpx2
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from draftsmith.scripts.services.coordinate.request import ApiError, CompletionRequest
from draftsmith.scripts.services.coordinate.routing import DOWN, FULL, UNKNOWN, Facts, Refusal, Server
from draftsmith.scripts.services.http_server import LEFT, client_gone
from draftsmith.train.endpoint.http import MOST_BYTES, HttpClient, ServerFailure

BUSY_OR_GONE = frozenset({429, 502, 503, 504})  # another server may answer otherwise
BROKEN = 500
"""The status of a broken server, or of a request that no server can answer: another server tells which. If there is no
other, or it gives the same status, the server did not fail."""
UNREAD = frozenset({400, 422})  # the server may refuse only what the log adds, as SGLang does for streamed chats
LOCKED = frozenset({401, 403})
"""The server refused the coordinator's own key. The client does not see the answer: some servers echo the key."""
CONNECT = 5.0  # seconds to wait for a connection to a server
PAIR_HEADER, REQUEST_ID = b"x-draftsmith-pair", "x-request-id"


@dataclass
class Outcome:
    """The outcome of a request at one server."""

    server: Server
    status: int = 0  # HTTP status of the answer; 0 if there was none, or another server was asked
    failed: bool = False  # the server failed
    first_byte: float | None = None  # seconds from the request to the answer's first byte
    seconds: float = 0.0


class Names:
    """Replaces the server's model name in an answer by the client's, while the answer streams.

    Quotes inside texts are escaped, so `"model"` with bare quotes is a field. `servers` is None if the names are equal.
    """

    def __init__(self, servers: str | None, clients: str):
        self._pattern: re.Pattern[bytes] | None = None
        if servers is not None and servers != clients:
            spelled = {json.dumps(servers, ensure_ascii=ascii).encode("utf-8", "replace") for ascii in (True, False)}
            self._pattern = re.compile(rb'("model"\s*:\s*)(?:' + b"|".join(map(re.escape, spelled)) + b")")
        self._clients, self._rest = json.dumps(clients).encode(), bytearray()

    def whole(self, content: bytes) -> bytes:
        """Return a whole answer, or whole lines of one, with the names replaced."""
        return content if self._pattern is None else self._pattern.sub(lambda m: m[1] + self._clients, content)

    def part(self, content: bytes) -> bytes:
        """Return the lines that are complete so far; the start of an incomplete one waits, up to `MOST_BYTES`."""
        if self._pattern is None:
            return content
        self._rest += content
        if b"\n" not in content:  # joined once, not at each byte of a line that comes byte by byte
            return self.end() if len(self._rest) > MOST_BYTES else b""
        lines, end, self._rest = self._rest.rpartition(b"\n")
        return self.whole(bytes(lines + end))

    def end(self) -> bytes:
        """Return the incomplete last line."""
        rest, self._rest = self._rest, bytearray()
        return self.whole(bytes(rest))


class Dispatch(Protocol):
    """Chooses servers, and counts outcomes."""

    clients: dict[str, HttpClient]
    server_models: dict[str, str | None]

    def acquire(self, facts: Facts, failed_urls: list[str]) -> Server | Refusal:
        """Choose a server, which is busy until `release`."""

    def release(self, server: Server) -> None:
        """Take back a server."""

    def count(self, outcome: Outcome) -> None:
        """Count an outcome."""


@dataclass
class RelayedAnswer:
    """An answer's bytes, for the log; `whole` if all of them arrived and fit."""

    pair: str = ""
    status: int = 0
    content: bytearray = field(default_factory=bytearray)
    first_byte: float | None = None
    seconds: float = 0.0
    whole: bool = False


class Relay(Response):
    """The relayed answer to a request; `logged` takes it once it is out."""

    def __init__(
        self,
        request: CompletionRequest,
        dispatch: Dispatch,
        logged: Callable[[RelayedAnswer], Awaitable[None]] | None = None,
    ):
        super().__init__()
        self.request, self.dispatch, self.logged, self.answer = request, dispatch, logged, RelayedAnswer()
        self._begin = time.perf_counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and stop when the client leaves, so that the server stops writing too."""
        answering = asyncio.ensure_future(self._answer(scope, receive, send))
        leaving = asyncio.ensure_future(client_gone(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
            results = await asyncio.gather(answering, leaving, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]
        if self.logged is not None and self.answer.whole:
            await self.logged(self.answer)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        failed_urls: list[str] = []
        fallback: Response | None = None  # the answer if no other server gives one
        suspect: Server | None = None  # of a server that answered 500
        while True:
            choice = self.dispatch.acquire(self.request.facts, failed_urls)
            if isinstance(choice, Refusal):
                if suspect is not None:
                    self.dispatch.count(Outcome(suspect, BROKEN, seconds=time.perf_counter() - self._begin))
                fallback = fallback or error_response(refusal(choice, self.request.facts.model))
                await fallback(scope, receive, send)
                return
            outcome = Outcome(choice, LEFT)
            try:
                failure = await self._ask(choice, outcome, send, suspect)
            finally:
                outcome.seconds = time.perf_counter() - self._begin
                self.dispatch.release(choice)
                self.dispatch.count(outcome)
            if failure is None:
                return
            if suspect is None:
                fallback, suspect = failure, choice if failure.status_code == BROKEN else None
            failed_urls.append(choice.url)

    async def _ask(self, server: Server, outcome: Outcome, send: Send, suspect: Server | None) -> Response | None:
        """Ask one server; return None if it has answered, otherwise the answer to give if no other server does.

        The outcome is written to `outcome`. `suspect` is a server that answered this request with 500.
        """
        client, path, begun = self.dispatch.clients[server.url], self.request.path, False
        server_model = self.dispatch.server_models[server.pair]
        content, names = self.request.content(server_model), Names(server_model, self.request.facts.model)
        headers = {**self.request.headers, "Content-Type": "application/json"}
        try:
            async with client.stream("POST", path, connect=CONNECT, content=content, headers=headers) as response:
                status = response.status_code
                if status in UNREAD and self.request.added:
                    self.request = replace(self.request, added={})
                    return await self._ask(server, outcome, send, suspect)
                if status in LOCKED:
                    outcome.status, outcome.failed = 0, True
                    return _server_error(502, f"the server of {server.pair} refused the coordinator")
                if status == BROKEN and suspect is None:  # keep the answer, in case no other server does better
                    outcome.status = 0
                    body = names.whole(await client.whole_body(response))
                    answer_500 = Response(body, status)
                    answer_500.raw_headers = _headers(response, server.pair, len(body))
                    return answer_500
                if status in BUSY_OR_GONE:
                    outcome.status, outcome.failed = 0, status != 429
                    return _server_error(status, f"the server of {server.pair} is busy or gone")
                if status != BROKEN and suspect is not None:  # this server can answer: the other one was broken
                    self.dispatch.count(Outcome(suspect, failed=True))
                if self.request.streams and status == 200:
                    parts = response.aiter_bytes()
                    first = await anext(parts, b"")  # the status goes out with the first byte, not before
                    begun, outcome.first_byte = True, time.perf_counter() - self._begin
                    await _start(send, status, _headers(response, server.pair))
                    await self._pass(send, names.part(first))
                    async for part in parts:
                        await self._pass(send, names.part(part))
                    await self._pass(send, names.end())
                    await self._pass(send, b"", more=False)
                else:
                    body = names.whole(await client.whole_body(response))
                    begun, outcome.first_byte = True, time.perf_counter() - self._begin
                    await _start(send, status, _headers(response, server.pair, len(body)))
                    await self._pass(send, body, more=False)
                outcome.status = status
        except ServerFailure:  # its message names the server, which is not the client's business
            outcome.status, outcome.failed = 502 if begun else 0, True
            if not begun:
                return _server_error(502, f"the server of {server.pair} failed")
            # The status is out already: the error becomes a last event, after a blank line that ends a broken one.
            failure = ApiError(502, f"the server of {server.pair} failed", "server_error")
            event = f"\n\ndata: {json.dumps(failure.body())}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": False})
            return None
        answer = self.answer
        answer.pair, answer.status, answer.first_byte = server.pair, outcome.status, outcome.first_byte
        answer.whole, answer.seconds = len(answer.content) <= MOST_BYTES, time.perf_counter() - self._begin
        return None

    async def _pass(self, send: Send, part: bytes, more: bool = True) -> None:
        if self.logged is not None and len(self.answer.content) <= MOST_BYTES:
            self.answer.content += part
        if part or not more:
            await send({"type": "http.response.body", "body": part, "more_body": more})


def refusal(refused: Refusal, model: str) -> ApiError:
    """Return the client's error if no server can be asked."""
    return {
        UNKNOWN: ApiError(404, f"model: expected one that is served, found {model!r:.200}", param="model"),
        FULL: ApiError(429, "all servers of this model are full; try again", "rate_limit_error"),
        DOWN: ApiError(503, "no server of this model is well; try again", "server_error"),
    }[refused.why]


def error_response(error: ApiError) -> Response:
    """Return an error in OpenAI's shape."""
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.body(), error.status, headers)


def _server_error(status: int, message: str) -> Response:
    return error_response(ApiError(status, message, "server_error"))


def _headers(response: httpx2.Response, pair: str, length: int | None = None) -> list[tuple[bytes, bytes]]:
    """Return an answer's headers; from the server only the content type and the request's id, which its log names."""
    kind = response.headers.get("Content-Type", "application/json")
    headers = [(b"content-type", kind.encode("latin-1", "replace")), (PAIR_HEADER, pair.encode("utf-8"))]
    if request_id := response.headers.get(REQUEST_ID):
        headers.append((REQUEST_ID.encode(), request_id.encode("latin-1", "replace")))
    length_known = [(b"content-length", str(length).encode())]
    return headers + ([(b"cache-control", b"no-store")] if length is None else length_known)


async def _start(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
