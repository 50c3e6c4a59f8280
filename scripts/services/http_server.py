"""An HTTP server with bounded headers and bounded idle connections.

uvicorn closes a connection that is idle after an answer, but not one that never sends a request or never ends its
headers. Here these are closed too. If too many connections are open without a request, the one that has waited longest
is closed, unless it has waited for less than a burst takes to be read. The application limits the time of bodies. So no
client keeps another one out, and health checks are answered under any load.
"""

import asyncio
import resource
import signal
import socket
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from starlette.requests import Request
from starlette.types import Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

from draftsmith.decode.errors import InputError

HEADER_BYTES = 65_536
"""The limit of a request's line and headers together; h11 reads them at linear cost, and refuses more with 400."""
HEADER_SECONDS = 10.0
"""The time limit for the headers of a connection's first request, and of a request that has begun."""
MOST_WAITING = 4096
"""The limit of connections without a whole request: more than the coordinator serves at a time, and half of `FILES`; at
most half of the files that may be open."""
PATIENCE = 1.0  # seconds before a connection may be closed: many may be accepted before the first is read
FILES = 8192  # open files to ask for: each connection takes one, and so does each to another server
LEFT = 499  # the status that counts requests whose client has left; nobody reads it


class BoundedProtocol(H11Protocol):
    """A connection."""

    _late: asyncio.TimerHandle | None = None
    _since = 0.0

    @property
    def waits(self) -> bool:
        """True if no whole request has arrived, and one still may."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing()

    @property
    def claim(self) -> tuple[bool, float]:
        """The order in which connections are closed, least first: by waiting time, but senders of a body last."""
        return self.conn.their_state is h11.SEND_BODY, self._since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer; if too many connections wait, close one that has had its time."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._expect_headers()
        most = min(MOST_WAITING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        if len(self.connections) <= most:
            return
        # Abort at most one for each new connection, so that the number stays at the limit.
        waiting = [c for c in self.connections if isinstance(c, BoundedProtocol) and c.waits]
        late = [c for c in waiting if c._since < self._since - PATIENCE]
        if len(waiting) > most and late:
            min(late, key=lambda connection: connection.claim).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read data, and limit the time of headers that have begun."""
        begins = self.conn.their_state is h11.IDLE
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            if begins:
                self._since = self.loop.time()
            self._stop_expecting()
        elif not self.transport.is_closing():
            self._expect_headers()

    def on_response_complete(self) -> None:
        """Start to wait for the next request."""
        self._since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_expecting()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close idle connections, and those of incomplete requests, whose rest may never come."""
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
    """A refused body: an HTTP status and one line."""

    def __init__(self, status: int, line: str):
        super().__init__(line)
        self.status = status


class BodyReader:
    """Reads requests' bodies of up to `most` bytes each, and `together` bytes at once."""

    def __init__(self, most: int, together: int):
        self._most, self._room = most, together

    async def read(self, request: Request) -> bytes:
        """Return a request's body; raise BodyError if bodies are too large, ClientDisconnect if it ends early."""
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


async def client_gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def bounded_server(app: Any, keep_alive: float, grace: float) -> uvicorn.Server:
    """Return an ASGI server; connections may idle for `keep_alive` s, and requests have `grace` s when it ends."""
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


def ended_by_signals(server: uvicorn.Server) -> None:
    """Let SIGTERM and SIGINT end a server and not the process: call it before the server starts.

    uvicorn ends by these signals, and raises them again after it has ended, which is no failure. These handlers also
    keep a signal that arrives before uvicorn sets its own.
    """

    def end(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def open_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Raises:
        InputError: the port is taken, or the host is not an address of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        found = error.strerror or str(error)
        raise InputError(f"port: expected a free one at {host}, found {port}: {found}") from error
