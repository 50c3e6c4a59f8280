"""Parts of HTTP that the services share: an ASGI server that signals end, its socket, and the limit of a body."""

import resource
import signal
import socket
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.requests import Request
from starlette.types import Receive

from draftsmith.decode.errors import InputError

HEADER_BYTES = 65_536
"""The limit of a request's line and headers together; h11 reads them at linear cost, and refuses more with 400."""
FILES = 8192  # open files to ask for: each connection takes one, and so does each to another server
LEFT = 499  # the status that counts requests whose client has left; nobody reads it


class BodyError(Exception):
    """A refused body, in one line."""


async def read_body(request: Request, most: int) -> bytes:
    """Return a request's body; raise BodyError if it has more than `most` bytes, ClientDisconnect if it ends early."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise BodyError(f"body: expected at most {most} bytes, found more")
    return bytes(body)


async def client_gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def asgi_server(app: Any, keep_alive: float, grace: float) -> uvicorn.Server:
    """Return an ASGI server; connections may idle for `keep_alive` s, and requests have `grace` s when it ends."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = FILES if most == resource.RLIM_INFINITY else min(FILES, most)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    config = uvicorn.Config(
        app,
        http="h11",
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
