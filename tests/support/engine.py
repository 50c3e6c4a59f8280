"""A real vLLM as a subprocess, on this machine's CPU: `make engine` installs it."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fated import start

from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.scripts import cli
from draftsmith.scripts.engines.client import metrics_of
from draftsmith.train.endpoint.client import Client

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-engine" / "bin" / "python"
TARGET, DRAFT = ROOT / "assets" / "tiny-target", ROOT / "assets" / "tiny-draft"
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # what computes is not a process more, unless there are several
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
START = 300
"""Seconds within which a server must answer."""


@contextmanager
def warm_engine(folder: Path) -> Iterator[Path]:
    """Start what runs commands in forks of a Python that has imported vLLM; yield what stands for that Python."""
    assert PYTHON.exists(), "no engine: run `make engine`"
    address, python, program = folder / "socket", folder / "python", str(ROOT / "tests" / "support" / "warm_engine.py")
    with (folder / "log").open("wb") as output:
        process = start([str(PYTHON), "-P", program, str(address)], output, ENVIRONMENT)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -SE "{program}" "{address}" "$@"\n')
    python.chmod(0o755)
    try:
        until = time.monotonic() + START
        while not address.exists():
            assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.05)
        yield python
    finally:
        end(process)


@dataclass
class Served:
    """A server that answers."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]


async def counters(url: str) -> ServerCounts:
    """Return a server's counts since its start."""
    async with Client(url) as client:
        return (await metrics_of(client)).counters


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def vllm_server(
    target: str | Path,
    log: Path,
    speculative: Mapping[str, object] | None = None,
    *flags: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """Start a server in float32, wait until it answers, and end it with all its processes.

    Args:
        target: the model's directory.
        log: a file for what it prints.
        speculative: its `--speculative-config`; plain decoding if None.
        flags: further arguments, which win over those given here.
        environment: further variables.
    """
    port = free_port()
    given = "--dtype float32 --max-model-len 512 --enforce-eager --max-num-seqs 8 --no-enable-prefix-caching --seed 0"
    given += " --kv-cache-memory-bytes 268435456"  # unless told, it takes all memory that there is
    command = [os.environ["DRAFTSMITH_ENGINE"], str(PYTHON.parent / "vllm"), "serve", str(target)]
    command += ["--host", "127.0.0.1", "--port", str(port), *given.split()]
    if speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    with log.open("wb") as output:
        process = start([*command, *flags], output, {**ENVIRONMENT, **(environment or {})})
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{url}/health", process, log)
        yield Served(url, log, process)
    finally:
        end(process)


def verified(
    capsys: Any, names: Sequence[str], gamma: int, *flags: object, target: Path = TARGET, form: str = "vllm"
) -> list[list[int]]:
    """Have `export` verify a drafter in vLLM: 8 texts and all counts. Return, by name, what was accepted by place."""
    argv = ["export", "--target", target, "--format", form, *flags, "--verify", "vllm"]
    assert cli.main([*map(str, argv)]) == 0
    out, err = capsys.readouterr()
    assert not err and out.count("as replay says that vLLM counts\n") == len(names)
    found = []
    for name in names:
        line = f"# {name}, γ = {gamma}: "
        assert f"# vLLM with {name}: 8 of 8 texts are its text without\n{line}" in out
        counted = out[out.index(line) :].splitlines()[0]
        assert counted.endswith("as replay says that vLLM counts")
        found.append(json.loads(counted[counted.index("[") : counted.index("]") + 1]))
    return found


def extracting(layers: Sequence[int], folder: Path) -> tuple[dict[str, object], tuple[str, ...], dict[str, str]]:
    """Return the speculative config, flags and environment of a server that sends states after some layers."""
    module = "draftsmith.scripts.services.target_states"
    transfer = {
        "kv_connector": "StatesConnector",
        "kv_connector_module_path": module,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    states = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": states}
    flags = "--kv-transfer-config", json.dumps(transfer), "--middleware", f"{module}.StatesMiddleware"
    return method, flags, {"PYTHONPATH": str(ROOT / ".typing")}


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = START) -> None:
    """Wait until a URL answers 200; fail with the end of the log where the process ends or takes too long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
    raise AssertionError(f"no answer from {url} (exit code {process.poll()}):\n{tail}")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads its own session, with all that it started."""
    process.terminate()  # it ends its own workers
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()
