"""The engine's Python, warm: one process imports vLLM, and each command that it is to run is a fork of that process.

A fresh Python takes ten seconds of a core to import vLLM, and a server is two or three of them. The engine's Python
runs this file as that process; any other as what stands for the engine's Python: it hands its arguments, directory,
variables, input and outputs to a fork, and ends as that ends.

    python warm_engine.py SOCKET [[-P] (FILE | -c CODE) [ARGUMENT ...]]
"""

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

MODULES = (
    *("entrypoints.cli.main", "entrypoints.launchers.api_server.entry", "entrypoints.llm", "v1.worker.cpu_worker"),
    *("v1.executor.uniproc_executor", "model_executor.layers.quantization.online.base", "model_executor.models.llama"),
)
"""Those of vLLM's that a server or a decoder imports."""


def ask(address: str, arguments: Sequence[str]) -> int:
    """Run a command in a fork, and return its exit code; a signal to end is handed on."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    asked = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(line, [len(asked).to_bytes(4, "big")], [0, 1, 2])
    line.sendall(asked)
    answers = line.makefile()
    process = int(answers.readline())
    signal.signal(signal.SIGTERM, lambda *_: os.kill(process, signal.SIGTERM))
    return int(answers.readline())


def become(arguments: Sequence[str], folder: str, variables: dict[str, str]) -> None:
    """Go on as a Python that was started so."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    from prometheus_client import values

    values.ValueClass = values.get_value_class()  # which a variable decides
    sys.argv = [argument for place, argument in enumerate(arguments) if place or argument != "-P"]
    if sys.argv[0] == "-c":
        exec(sys.argv.pop(1), {"__name__": "__main__"})
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def mind(line: socket.socket) -> None:
    """Run what a connection asks for; when its other end closes, end it, with all that it started."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, streams, *_ = socket.recv_fds(line, 4, 3)
    asked = json.loads(line.makefile("rb").read(int.from_bytes(length, "big")))
    process = os.fork()
    if process == 0:
        os.setsid()
        line.close()
        for place, stream in enumerate(streams):
            os.dup2(stream, place)
        os.closerange(min(streams), max(streams) + 1)
        return become(*asked)
    line.sendall(b"%d\n" % process)

    def end_with_asker() -> None:
        line.recv(1)
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)

    threading.Thread(target=end_with_asker, daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with suppress(OSError):
        line.sendall(b"%d\n" % (code if code >= 0 else 128 - code))
    os._exit(0)


def serve(address: str) -> None:
    """Import, and mind each connection in a fork."""
    for name in MODULES:
        importlib.import_module(f"vllm.{name}")
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # no signal of a child's is its parent's
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None  # each collection would go through all modules
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{address}~")
    listening.listen()
    os.rename(f"{address}~", address)
    while True:
        line, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            return mind(line)
        line.close()


if __name__ == "__main__":
    address, *arguments = sys.argv[1:]
    sys.exit(ask(address, arguments) if arguments else serve(address))
