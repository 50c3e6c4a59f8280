"""The coordinator as the command starts it, and servers that answer OpenAI's API as a test tells them."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx2
from engine import end, free_port
from fated import start
from local_server import LocalHandler, LocalServer

START = 120
"""Seconds within which it answers."""
Answer = Callable[["Exchange"], None]


class Exchange:
    """One request at a stub, and the ways to answer it."""

    def __init__(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]):
        self.handler, self.body = handler, body

    def whole(self, text: str = "hello", status: int = 200, reason: str = "stop") -> None:
        message = {"role": "assistant", "content": text}
        body = {"model": self.body["model"], "choices": [{"index": 0, "message": message, "finish_reason": reason}]}
        content = json.dumps(body if status == 200 else {"error": {"message": text}}).encode()
        self.handler.send_response(status)
        self.handler.send_header("Content-Type", "application/json")
        self.handler.send_header("Content-Length", str(len(content)))
        self.handler.send_header("X-Request-Id", "from-the-server")
        self.handler.end_headers()
        self.handler.wfile.write(content)

    def begin(self) -> None:
        self.handler.send_response(200)
        self.handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.handler.send_header("Transfer-Encoding", "chunked")
        self.handler.end_headers()

    def part(self, text: str | None, reason: str | None = None) -> None:
        delta = {} if text is None else {"content": text}
        self.event(json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}))

    def event(self, data: str) -> None:
        content = f"data: {data}\n\n".encode()
        self.handler.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        self.handler.wfile.flush()

    def finish(self) -> None:
        self.part(None, "stop")
        self.event("[DONE]")
        self.handler.wfile.write(b"0\r\n\r\n")


def answer_hello(exchange: Exchange) -> None:
    """Answer as was asked: in one piece, or in three parts."""
    if not exchange.body.get("stream"):
        exchange.whole()
        return
    exchange.begin()
    for text in ("hel", "lo"):
        exchange.part(text)
    exchange.finish()


class Stub:
    """A server of one model."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answer: Answer = answer_hello
        self._server: LocalServer | None = None
        self._open: list[socket.socket] = []

    def start(self) -> None:
        stub = self

        class Handler(LocalHandler):
            def setup(self) -> None:
                super().setup()
                stub._open.append(self.connection)

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.asked.append(body)
                stub.keys.append(self.headers["Authorization"])
                try:
                    stub.answer(Exchange(self, body))
                except OSError:  # the client has left
                    self.close_connection = True

        self._server = LocalServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """Be gone: nothing listens at the port, and connections are cut."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
            for connection in self._open:
                with suppress(OSError):  # closed by its client
                    connection.shutdown(socket.SHUT_RDWR)
            self._open.clear()


@contextmanager
def coordinator(
    config: Mapping[str, Any], folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start `draftsmith coordinate`, wait until it answers, and end it with all its processes; its URL, and itself."""
    port = free_port()
    file, log = folder / "coordinator.yaml", folder / "coordinator.log"
    file.write_text(json.dumps({**config, "port": port}))  # which is YAML
    command = [sys.executable, "-m", "draftsmith.scripts.cli", "coordinate", "--config", str(file)]
    with log.open("wb") as output:
        process = start(command, output, {"OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1", **(environment or {})})
    try:
        until = time.monotonic() + START
        while b"coordinator: http" not in log.read_bytes():
            assert process.poll() is None and time.monotonic() < until, log.read_text(errors="replace")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process
    finally:
        end(process)


def metric(url: str, name: str, **labels: str) -> float:
    """Return the sum of a metric over all whose labels hold."""
    total = 0.0
    for line in httpx2.get(f"{url}/metrics", timeout=30).text.splitlines():
        if line.startswith(f"draftsmith_coordinator_{name}") and all(f'{k}="{v}"' in line for k, v in labels.items()):
            total += float(line.rpartition(" ")[2])
    return total


def wait_until(holds: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it does not come about"
        time.sleep(0.05)
