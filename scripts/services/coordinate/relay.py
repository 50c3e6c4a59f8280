"""A request passed on to a server, and its answer passed back as it comes: byte for byte but for the model's name.

Where a server fails before a byte of its answer has gone out, another one is asked; after that never, for the client
would read the beginning of one answer and the end of another.
"""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx2
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftsmith.scripts.services.coordinate.asked import Asked, Refused
from draftsmith.scripts.services.coordinate.routing import DOWN, FULL, UNKNOWN, Facts, Lease, Refusal
from draftsmith.train.endpoint.http import MOST_BYTES, HttpClient, ServerFailure

BUSY_OR_GONE = frozenset({429, 502, 503, 504})
"""What a server answers that another one may not."""
BROKEN = 500
"""What a server answers that another one may not, or that the request itself brings about: then two answer it."""
LOCKED = frozenset({401, 403})
"""What a server answers to our key, which some repeat: the client, whose key it is not, does not see it."""
CONNECT = 5.0
"""Seconds to wait for a connection to a server."""
LEFT = 499
"""The status that a client's leaving is counted under; nobody reads it."""
PAIR_HEADER, REQUEST_ID = b"x-draftsmith-pair", "x-request-id"


@dataclass
class Outcome:
    """What became of a lease."""

    lease: Lease
    status: int = 0
    """That was answered; 0: the server failed, and another one was asked."""
    failed: bool = False
    """The server did."""
    first_byte: float | None = None
    """Seconds from the request to the first byte of its answer."""
    seconds: float = 0.0


class Names:
    """Puts the name that a client asked by in the place of the server's, as an answer goes by.

    Inside a text, quotes are escaped: `"model"` with bare ones is a field.

    Args:
        servers: what the server calls the model; None: as the client does.
        clients: what the client does.
    """

    def __init__(self, servers: str | None, clients: str):
        self._pattern: re.Pattern[bytes] | None = None
        if servers is not None and servers != clients:
            spelled = {json.dumps(servers, ensure_ascii=ascii).encode("utf-8", "replace") for ascii in (True, False)}
            self._pattern = re.compile(rb'("model"\s*:\s*)(?:' + b"|".join(map(re.escape, spelled)) + b")")
        self._clients, self._rest = json.dumps(clients).encode(), b""

    def whole(self, content: bytes) -> bytes:
        """Return an answer, or whole lines of one."""
        return content if self._pattern is None else self._pattern.sub(lambda m: m[1] + self._clients, content)

    def part(self, content: bytes) -> bytes:
        """Return the lines that have come to their ends; the beginning of one waits for the rest."""
        if self._pattern is None:
            return content
        lines, end, rest = (self._rest + content).rpartition(b"\n")
        self._rest = rest
        return self.whole(lines + end)

    def end(self) -> bytes:
        """Return what has had no end."""
        rest, self._rest = self._rest, b""
        return self.whole(rest)


class Dispatch(Protocol):
    """Who says which server is asked, and hears what became of it."""

    async def acquire(self, facts: Facts, tried: list[str]) -> Lease | Refusal:
        """Choose a server."""

    def ended(self, outcome: Outcome) -> None:
        """Take a lease back, at once and without waiting."""


@dataclass
class Kept:
    """An answer's bytes, for the log."""

    pair: str = ""
    status: int = 0
    content: bytearray = field(default_factory=bytearray)
    first_byte: float | None = None
    seconds: float = 0.0
    whole: bool = False
    """All of it came, and fits."""


class Relay(Response):
    """The answer to one request.

    Args:
        asked: the request.
        dispatch: chooses servers.
        clients: by URL.
        server_models: what a pair's servers call their model, by the pair's name.
        logged: is given the answer once all of it has gone out; None where nobody wants it.
    """

    def __init__(
        self,
        asked: Asked,
        dispatch: Dispatch,
        clients: Mapping[str, HttpClient],
        server_models: Mapping[str, str | None],
        logged: Callable[[Kept], Awaitable[None]] | None = None,
    ):
        super().__init__()
        self.asked, self.dispatch, self.clients, self.server_models = asked, dispatch, clients, server_models
        self.logged, self.kept = logged, Kept()
        self._begin = time.perf_counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and stop where the client leaves: what it no longer reads is not written."""
        answering = asyncio.ensure_future(self._answer(send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
            results = await asyncio.gather(answering, leaving, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]
        if self.logged is not None and self.kept.whole:
            await self.logged(self.kept)

    async def _answer(self, send: Send) -> None:
        tried: list[str] = []
        refused: Refused | None = None
        while True:
            chosen = await self.dispatch.acquire(self.asked.facts, tried)
            if isinstance(chosen, Refusal):
                await _refuse(send, refused or refusal(chosen, self.asked.facts.model))
                return
            outcome = Outcome(chosen, LEFT)
            try:
                refused = await self._ask(chosen, outcome, send, refused is not None and refused.status == BROKEN)
            finally:
                outcome.seconds = time.perf_counter() - self._begin
                self.dispatch.ended(outcome)
            if refused is None:
                return
            tried.append(chosen.url)

    async def _ask(self, lease: Lease, outcome: Outcome, send: Send, failed_before: bool) -> Refused | None:
        """Ask one server; return None if it has answered, and what to say if no other one does.

        Args:
            lease: which.
            outcome: is told what becomes of it.
            send: takes the answer.
            failed_before: the server before has answered 500.
        """
        client, begun = self.clients[lease.url], False
        server_model = self.server_models[lease.pair]
        content, names = self.asked.content(server_model), Names(server_model, self.asked.facts.model)
        try:
            headers = {**self.asked.headers, "Content-Type": "application/json"}
            async with client.stream(
                "POST", self.asked.path, connect=CONNECT, content=content, headers=headers
            ) as response:
                if response.status_code in LOCKED:
                    outcome.status, outcome.failed = 0, True
                    return Refused(502, f"the server of {lease.pair} refused the coordinator", "server_error")
                if response.status_code == BROKEN and not failed_before:
                    outcome.status, outcome.failed = 0, True
                    return Refused(BROKEN, f"the server of {lease.pair} failed", "server_error")
                if response.status_code in BUSY_OR_GONE:
                    outcome.status, outcome.failed = 0, response.status_code != 429
                    return Refused(response.status_code, f"the server of {lease.pair} is busy or gone", "server_error")
                if self.asked.streams and response.status_code == 200:
                    parts = response.aiter_bytes()
                    first = await anext(parts, b"")
                    begun, outcome.first_byte = True, time.perf_counter() - self._begin
                    await _start(send, response, lease.pair)
                    await self._pass(send, names.part(first))
                    async for part in parts:
                        await self._pass(send, names.part(part))
                    await self._pass(send, names.end())
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                else:
                    body = names.whole(await client.whole_body(response))
                    begun, outcome.first_byte = True, time.perf_counter() - self._begin
                    await _start(send, response, lease.pair, len(body))
                    self._keep(body)
                    await send({"type": "http.response.body", "body": body, "more_body": False})
                outcome.status = response.status_code
        except ServerFailure:  # whose words name the server: they are not the client's business
            outcome.status, outcome.failed = 502 if begun else 0, True
            failure = Refused(502, f"the server of {lease.pair} failed", "server_error")
            if not begun:
                return failure
            await send({"type": "http.response.body", "body": b"\n\n" + _event(failure.body()), "more_body": False})
            return None
        self.kept.pair, self.kept.status, self.kept.first_byte = lease.pair, outcome.status, outcome.first_byte
        self.kept.whole, self.kept.seconds = len(self.kept.content) <= MOST_BYTES, time.perf_counter() - self._begin
        return None

    async def _pass(self, send: Send, part: bytes) -> None:
        if not part:
            return
        self._keep(part)
        await send({"type": "http.response.body", "body": part, "more_body": True})

    def _keep(self, part: bytes) -> None:
        if self.logged is not None and len(self.kept.content) <= MOST_BYTES:
            self.kept.content += part


def refusal(refused: Refusal, model: str) -> Refused:
    """Return what a client is told where no server can be asked."""
    return {
        UNKNOWN: Refused(404, f"model: expected one that is served, found {model!r:.200}", param="model"),
        FULL: Refused(429, "all servers of this model are full; try again", "rate_limit_error"),
        DOWN: Refused(503, "no server of this model is well; try again", "server_error"),
    }[refused.why]


async def _gone(receive: Receive) -> None:
    """Wait until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, response: httpx2.Response, pair: str, length: int | None = None) -> None:
    """Send the status and headers; of the server's own the content type and the request's id, which its log names."""
    kind = response.headers.get("Content-Type", "application/json")
    headers = [(b"content-type", kind.encode("latin-1", "replace")), (PAIR_HEADER, pair.encode("utf-8"))]
    if named := response.headers.get(REQUEST_ID):
        headers.append((REQUEST_ID.encode(), named.encode("latin-1", "replace")))
    headers += [(b"cache-control", b"no-store")] if length is None else [(b"content-length", str(length).encode())]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})


async def _refuse(send: Send, refused: Refused) -> None:
    body = json.dumps(refused.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.status in (429, 503):
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _event(body: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()
