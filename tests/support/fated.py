"""Processes that end with the tests that started them, however those end: at a signal no fixture runs.

`start` runs this file as a small process between the two. It waits for the end of a pipe that only the test's process
holds open, and ends then all that it started; a signal that it gets itself, it hands on.

    python fated.py COMMAND [ARGUMENT ...]
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

GRACE = 20
"""Seconds for a process to end by itself."""
PR_SET_PDEATHSIG = 1


def start(command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own; further variables are `environment`."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), *command],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def end_with_make() -> None:
    """End this process when the `make` that started it does, if one did: it hands no `kill -9` on."""
    import psutil

    above = psutil.Process().parents()
    last = max((place for place, process in enumerate(above) if process.name() in ("make", "gmake")), default=-1)

    def wait() -> None:
        with suppress(psutil.NoSuchProcess):
            while all(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in above[: last + 1]):
                time.sleep(0.25)
        os.kill(os.getpid(), signal.SIGTERM)

    if last >= 0:
        threading.Thread(target=wait, daemon=True).start()


def die_with_parent() -> None:
    """End this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(command: Sequence[str]) -> int:
    """Run a command, and return its exit code; end it, and what it started, when standard input ends."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: process.send_signal(number))

    def end_with_tests() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        ending.set()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        os.killpg(os.getpgid(0), signal.SIGKILL)  # what it started, and this

    ending = threading.Event()
    thread = threading.Thread(target=end_with_tests, daemon=True)
    thread.start()
    code = process.wait()
    if ending.is_set():
        thread.join()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
