"""An HTTP server that stays up: headers are bounded, and connections that ask for nothing end.

uvicorn ends a connection that is silent after an answer, and no other one: neither one that never asks, nor one whose
headers never end. Here they end too, and where too many are open without a request, the one that waits longest makes
room, if it has waited for longer than a burst takes to be read. How long a body may take is the application's to say.
So no client keeps another one out, and a health check is answered whoever is connected.
"""

import asyncio
import resource
import socket
from typing import Any, cast

import h11
import uvicorn
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from draftsmith.decode.errors import InputError

HEADER_BYTES = 65_536
"""Of a request's line and headers together; h11 reads them at linear cost, and refuses more with 400."""
HEADER_SECONDS = 10.0
"""Until a connection's first request, or one that has begun, has its headers."""
MOST_WAITING = 4096
"""Connections that are open without a whole request: more than an ingress serves at a time, and half of `FILES`. Where
fewer files may be open, half of these."""
PATIENCE = 1.0
"""Seconds that a connection has at least: many may be taken before the first of them is read."""
FILES = 8192
"""Open files that are asked for: a connection is one, and so is each one to another server."""


class BoundedProtocol(H11Protocol):
    """One connection."""

    _late: asyncio.TimerHandle | None = None
    _since = 0.0

    @property
    def waits(self) -> bool:
        """Whether no whole request has come yet, and one may still."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing()

    @property
    def claim(self) -> tuple[bool, float]:
        """Connections give way in this order, least first: senders of a body last, else the longest waiting first."""
        return self.conn.their_state is h11.SEND_BODY, self._since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait, and where too many do, end one of those that have had their time."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._expect_headers()
        most = min(MOST_WAITING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        if len(self.connections) <= most:
            return
        waiting = [c for c in self.connections if isinstance(c, BoundedProtocol) and c.waits]
        late = [c for c in waiting if c._since < self._since - PATIENCE]
        if len(waiting) > most and late:
            min(late, key=lambda connection: connection.claim).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read on, and bound the time of headers that have begun."""
        begins = self.conn.their_state is h11.IDLE
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            if begins:
                self._since = self.loop.time()
            self._stop_expecting()
        elif not self.transport.is_closing():
            self._expect_headers()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_expecting()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End what has not begun, and a request that has not come whole: nobody knows whether its rest will."""
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.more_body:
            self.transport.abort()
        else:
            super().shutdown()

    def _expect_headers(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEADER_SECONDS, self._end)

    def _stop_expecting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        self._late = None
        self.transport.abort()


class BodyError(Exception):
    """A body that is refused: an HTTP status and one line."""

    def __init__(self, status: int, line: str):
        super().__init__(line)
        self.status = status


class BodyReader:
    """Reads requests' bodies, bounded one by one and, while they come in, all together.

    Args:
        most: bytes of one.
        together: bytes of all that are being read.
    """

    def __init__(self, most: int, together: int):
        self._most, self._room = most, together

    async def read(self, request: Request) -> bytes:
        """Return a request's body.

        Raises:
            BodyError: it is too large, or there are too many at once.
            ClientDisconnect: it does not come whole.
        """
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                self._room -= len(part)
                if len(body) > self._most:
                    raise BodyError(413, f"body: expected at most {self._most} bytes, found more")
                if self._room < 0:
                    raise BodyError(503, "body: expected room to read it, found too many others; try again")
            return bytes(body)
        finally:
            self._room += len(body)


def bounded_server(app: Any, keep_alive: float, grace: float) -> uvicorn.Server:
    """Return a server of an application, to be run on sockets of `listening`.

    Args:
        app: ASGI.
        keep_alive: seconds that a connection stays open after an answer.
        grace: seconds that requests under way have when the server ends.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = FILES if most == resource.RLIM_INFINITY else min(FILES, most)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_keep_alive=cast(int, keep_alive),
        timeout_graceful_shutdown=cast(int, grace),
    )
    return uvicorn.Server(config)


def listening(host: str, port: int, shared: bool = False) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: a name or an address.
        port: 0 takes a free one.
        shared: with others that listen there by the same user; connections are dealt out among them.

    Raises:
        InputError: it is taken, or none of this machine's.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024, reuse_port=shared)
    except OSError as error:
        found = error.strerror or str(error)
        raise InputError(f"port: expected a free one at {host}, found {port}: {found}") from error
