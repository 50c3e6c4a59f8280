"""Servers that answer after a set time, the coordinator before them, and clients."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from draftsmith.decode.errors import InputError
from draftsmith.scripts.bench.door import BenchDoorConfig

PATH, MODEL = "/v1/chat/completions", "stub"
START = 120
"""Seconds within which the coordinator answers."""
ANSWER = json.dumps(
    {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    }
).encode()


@asynccontextmanager
async def stub(seconds: float) -> AsyncIterator[int]:
    """Serve answers that take this long each; gives the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await _message(reader):
            is_request = content.startswith(b"POST")
            await asyncio.sleep(seconds if is_request else 0)
            _send(writer, b"HTTP/1.1 200 OK", ANSWER if is_request else b"")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@asynccontextmanager
async def door(config: BenchDoorConfig, ports: list[int]) -> AsyncIterator[int]:
    """Start the coordinator before servers at these ports, and end it; gives its own port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    endpoints = [f"http://127.0.0.1:{each}" for each in ports]
    settings = {
        "pairs": [{"name": "stubs", "models": [MODEL], "endpoints": endpoints}],
        "port": port,
        "ingress": config.ingress,
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "coordinator.yaml"
        file.write_text(json.dumps(settings), encoding="utf-8")  # which is YAML
        process = subprocess.Popen(
            [sys.executable, "-m", "draftsmith.scripts.cli", "coordinate", "--config", str(file)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), START)
            if not line.startswith("coordinator: http"):
                raise InputError(f"coordinate: expected it to start, found: {line.strip() or 'an end'}")
            yield port
        finally:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, START)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


async def timed(config: BenchDoorConfig, ports: list[int], clients: int) -> list[float]:
    """Let clients ask these ports in turns; return the seconds of each request."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}).encode()
    taken: list[float] = []

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", ports[number % len(ports)])
        for turn in range(config.requests + 1):
            begun = time.perf_counter()
            _send(writer, f"POST {PATH} HTTP/1.1\r\nHost: door\r\nContent-Type: application/json".encode(), body)
            answer = await _message(reader)
            if not answer.startswith(b"HTTP/1.1 200"):
                raise InputError(f"door: expected answers, found {answer[:300].decode(errors='replace')!r}")
            if turn:  # the first one opens connections
                taken.append(time.perf_counter() - begun)
        writer.close()

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number))
    return taken


def _send(writer: asyncio.StreamWriter, head: bytes, body: bytes) -> None:
    writer.write(head + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


async def _message(reader: asyncio.StreamReader) -> bytes:
    """Return one whole request or answer; nothing at the end of a connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        fields = (line.partition(b":") for line in head.lower().split(b"\r\n"))
        length = next((int(value) for name, _, value in fields if name == b"content-length"), 0)
        return head + await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
