"""The server of the services: endless headers are refused, bodies are read, and a port that is taken is a line."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import pytest
from starlette.responses import PlainTextResponse

from draftsmith.decode.errors import InputError
from draftsmith.scripts.services.http_server import asgi_server, open_socket

HEAD = b"GET / HTTP/1.1\r\nHost: here\r\n"


async def app(scope, receive, send):
    body = bytearray()
    while (event := await receive())["type"] == "http.request":
        body += event["body"]
        if not event["more_body"]:
            await PlainTextResponse(f"{len(body)}")(scope, receive, send)
            return


@contextmanager
def served() -> Iterator[int]:
    door = open_socket("127.0.0.1", 0)
    server = asgi_server(app, keep_alive=60, grace=60)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([door])), daemon=True)
    thread.start()
    try:
        yield door.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


def ask(port: int, content: bytes = b"hello") -> str:
    return httpx2.post(f"http://127.0.0.1:{port}/", content=content, timeout=30).text


def test_headers_without_end_are_refused_and_bodies_are_not():
    with served() as port:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(HEAD + b"x: ")
            sent = 0
            try:
                for _ in range(256):  # 16 MiB
                    connection.sendall(b"x" * 65536)
                    sent += 65536
            except (ConnectionResetError, BrokenPipeError):
                pass
            assert sent < 16 * 2**20
        assert ask(port, b"x" * 2**22) == str(2**22)


def test_a_port_that_is_taken_is_a_line():
    with open_socket("127.0.0.1", 0) as door, pytest.raises(InputError, match=r"^port: expected a free one at 127"):
        open_socket("127.0.0.1", door.getsockname()[1])
