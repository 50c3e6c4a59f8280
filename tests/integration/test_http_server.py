"""The server of the services under clients that do not ask: they end, and others are answered."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import pytest
from starlette.responses import PlainTextResponse

from draftsmith.decode.errors import InputError
from draftsmith.scripts.services import http_server
from draftsmith.scripts.services.http_server import bounded_server, open_socket

HEAD = b"GET / HTTP/1.1\r\nHost: here\r\n"
HALF = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 9\r\n\r\nhalf"


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
    server = bounded_server(app, keep_alive=60, grace=60)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([door])), daemon=True)
    thread.start()
    try:
        yield door.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


def ended(connection: socket.socket) -> bytes:
    """Return what a connection gets before the server ends it; fails where that does not come."""
    connection.settimeout(30)
    got = bytearray()
    try:
        while part := connection.recv(65536):
            got += part
    except ConnectionResetError:
        pass
    return bytes(got)


def ask(port: int, content: bytes = b"hello") -> str:
    return httpx2.post(f"http://127.0.0.1:{port}/", content=content, timeout=30).text


def test_a_connection_without_a_request_ends(monkeypatch):
    monkeypatch.setattr(http_server, "HEADER_SECONDS", 0.2)
    with served() as port:
        for begun in (b"", HEAD):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(begun)
                assert ended(connection) == b""
        with socket.create_connection(("127.0.0.1", port)) as connection:  # and one that has asked before
            connection.sendall(HEAD + b"\r\n")
            answer = b""
            while not answer.endswith(b"\r\n\r\n0"):
                answer += connection.recv(65536)
            connection.sendall(HEAD)
            assert ended(connection) == b""


def test_the_one_that_waits_longest_makes_room(monkeypatch):
    monkeypatch.setattr(http_server, "MOST_WAITING", 4)
    monkeypatch.setattr(http_server, "PATIENCE", 0.0)
    with served() as port:
        waiting = []
        for begun in (HALF, b"", HEAD, HALF, b"", HEAD):
            waiting.append(socket.create_connection(("127.0.0.1", port)))
            waiting[-1].sendall(begun)
            assert ask(port) == "5"  # so that it has been read; this one asks nothing more, and is ended in its turn
        for silent in (waiting[1], waiting[2]):
            assert ended(silent) == b""
        for sending in (waiting[0], waiting[3]):  # those that send a body are the last to go
            sending.sendall(b" more")
            sending.settimeout(30)
            assert sending.recv(65536).startswith(b"HTTP/1.1 200")
        for connection in waiting:
            connection.close()


def test_a_burst_is_no_reason_to_end_those_that_came_first(monkeypatch):
    monkeypatch.setattr(http_server, "MOST_WAITING", 4)
    monkeypatch.setattr(http_server, "PATIENCE", 60.0)
    with served() as port:
        burst = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        assert ask(port) == "5"  # all of them have been taken before
        for connection in burst:
            connection.sendall(HEAD + b"\r\n")
            connection.settimeout(30)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            connection.close()


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


def test_half_a_request_does_not_hold_up_the_end():
    with served() as port:
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 9\r\n\r\nhalf")
        assert ask(port) == "5"  # so that half of the other has come
    assert ended(connection) == b""
    connection.close()


def test_a_port_that_is_taken_is_a_line():
    with open_socket("127.0.0.1", 0) as door, pytest.raises(InputError, match=r"^port: expected a free one at 127"):
        open_socket("127.0.0.1", door.getsockname()[1])
