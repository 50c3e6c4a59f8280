"""HTTP servers on this machine: a quiet one to build on, and one that always answers the same."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class LocalServer(ThreadingHTTPServer):
    """The base of fake servers; a client that leaves is not printed."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors, but for a connection that its client has reset."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class LocalHandler(BaseHTTPRequestHandler):
    """The base of what fake servers answer with; it prints nothing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # as servers do: a part that waits for an acknowledgement comes 40 ms late

    def log_message(self, *arguments: object) -> None:
        """Say nothing of a request."""


@asynccontextmanager
async def answering(body: bytes | list[bytes], status: str = "200 OK") -> AsyncIterator[str]:
    """Give the URL of a server that answers every request so; a list of bytes comes in these pieces."""
    chunks = None if isinstance(body, bytes) else [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*body, b""]]
    kind = "" if chunks is None else "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    content = body if isinstance(body, bytes) else b"".join(chunks or ())

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\n{kind}Connection: close\r\n\r\n".encode() + content)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
