"""The end of a job's processes: after a failure all end at once, with the message of the first that failed.

A process that waits in a collective does not notice that another has ended, on NCCL for minutes. So each process holds
a socket to the first one. When a process ends, even by a kill, its socket closes, and the others end too.

Nothing here imports torch before a job of several processes has begun.
"""

import atexit
import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from draftsmith.train.cli import run

GRACE = 1.0
"""Seconds that a process waits before it reports an error that another process may have caused and report first."""
LONGEST = 10.0  # the most seconds that it waits for another's message, or for its turn
FINE, SPEAK = "fine", "speak"
"""Messages between processes; the only other one is the exit code of a process that failed."""

_watch: "RankWatch | None" = None


class RankWatch:
    """A socket between each process of a job and the first, and threads that read them."""

    def __init__(self, rank: int, count: int, device: Any):
        """Connect this process, of `count`; all processes of a job do so together, after their process group is up.

        The process group must be able to broadcast from `device`.
        """
        import torch

        self.rank = rank
        self._lock, self._failed, self._done = threading.Lock(), False, False
        self._turn = threading.Event()
        self._peers: list[socket.socket] = []
        server = socket.create_server(("", 0), backlog=count) if rank == 0 else None
        meeting = [(server.getsockname()[1], secrets.token_hex(8)) if server else None]
        torch.distributed.broadcast_object_list(meeting, src=0, device=device)
        port, token = meeting[0] or (0, "")
        try:
            if server is not None:
                self._accept(server, token, count - 1)
            else:
                self._call(port, token)
        except OSError as error:
            print(
                f"warning: rank {rank} cannot hear whether others fail, and may wait for them: {error}", file=sys.stderr
            )

    def claims(self, code: int) -> bool:
        """Return whether this process is the first that failed and may report it.

        If another was first, the process is ended here, or sleeps until it is.
        """
        if self.rank == 0:
            if self._is_first():
                return True
            time.sleep(LONGEST)
            return False
        self._send(str(code))
        self._turn.wait(LONGEST if self._peers else 0)
        return True  # without an answer: two reports are better than none

    def end(self, code: int) -> NoReturn:
        """End this process at once, and the others with it."""
        if self.rank == 0:
            self._send(str(code))
        os._exit(code)

    def finish(self) -> None:
        """Tell the others that the end of this process is no failure."""
        self._done = True
        self._send(FINE)

    def _accept(self, server: socket.socket, token: str, count: int) -> None:
        server.settimeout(LONGEST)
        with server:
            while len(self._peers) < count:
                peer = _kept_alive(server.accept()[0])
                with contextlib.suppress(OSError, ValueError):  # a stranger may connect, and send anything
                    lines = peer.makefile()
                    sent, _, who = lines.readline().strip().partition(" ")
                    if sent == token:
                        peer.settimeout(None)
                        self._peers.append(peer)
                        _in_background(self._serve, peer, lines, who)

    def _call(self, port: int, token: str) -> None:
        address = os.environ.get("MASTER_ADDR", "127.0.0.1"), port
        first = _kept_alive(socket.create_connection(address, timeout=LONGEST))
        first.settimeout(None)
        self._peers.append(first)
        self._send(f"{token} rank {self.rank} on {socket.gethostname()}")
        _in_background(self._listen, first)

    def _serve(self, peer: socket.socket, lines: Iterable[str], who: str) -> None:
        """Read one other process's messages, in the first process."""
        code = 1
        with contextlib.suppress(OSError):
            for line in lines:
                if line.strip() == FINE:
                    return
                code = int(line)
                if self._is_first():
                    peer.sendall(f"{SPEAK}\n".encode())
        if self._done:
            return
        if self._is_first():
            _say_of_killed(who)
        self.end(code)

    def _listen(self, first: socket.socket) -> None:
        """Read the first process's messages, in another process."""
        with contextlib.suppress(OSError), first.makefile() as lines:
            for line in lines:
                if line.strip() == FINE:
                    return
                if line.strip() != SPEAK:
                    os._exit(int(line))
                self._turn.set()
        if self._done:
            return
        if self.rank == 1:
            _say_of_killed(f"rank 0 on {os.environ.get('MASTER_ADDR', 'this machine')}")
        time.sleep(GRACE)
        os._exit(1)

    def _is_first(self) -> bool:
        with self._lock:
            first, self._failed = not self._failed, True
        return first

    def _send(self, line: str) -> None:
        for peer in self._peers:
            with contextlib.suppress(OSError):  # it has ended
                peer.sendall(f"{line}\n".encode())


def watch(device: Any) -> None:
    """Make the processes of this job end together, until `finish`; do nothing in a job of one process."""
    global _watch
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_world_size() > 1:
        _watch = RankWatch(dist.get_rank(), dist.get_world_size(), device)


def finish() -> None:
    """End this process's part in a job that went well."""
    global _watch
    if _watch is not None:
        _watch.finish()
        _watch = None


def run_rank(main: Callable[[], int | None]) -> int:
    """Run a command as one process of a job, and return its exit code; in a job of one process, as `cli.run` does.

    The first process that fails reports why, in one line or, for a bug, with its traceback. It and all the others then
    end at once, without waiting for collectives and destructors, and this function does not return.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return run(main)
    try:
        code = run(main, _say)
    except SystemExit as end:  # another process reports the error
        code = end.code if isinstance(end.code, int) else 1
        time.sleep(LONGEST if code else 0)
    except BaseException as error:
        code = 1
        time.sleep(GRACE)  # if another process's end caused this error, that process reports first
        _say("".join(traceback.format_exception(error)).rstrip(), code)
    if code == 0:
        return 0
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if _watch is not None:
        _watch.end(code)
    os._exit(code)


def leave(code: int) -> NoReturn:
    """End this process; in a job of several, without destructors.

    A DDP reducer keeps the process group alive, and with it Gloo's worker threads. If one of them frees a tensor while
    the interpreter shuts down, it aborts a process that has finished well ("terminate called without an active
    exception"). Threads are joined and exit handlers run first, such as a tracker's last upload.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]  # as `multiprocessing` ends its processes
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def killed_message(who: str, how: str = "") -> str:
    """Return the error message for a process that was killed before it could report anything."""
    why = "for want of memory or by the scheduler; run the same command again"
    return f"error: {who} ended without a word: expected it to finish, found it killed{how}, {why}"


def _say(message: str, code: int) -> None:
    """Print how this process failed, if it is the first to fail, and write it in a file for the launcher."""
    if _watch is not None:
        if _watch.claims(code):
            _print(f"rank {_watch.rank}: {message}")
    elif _first_on_this_machine():
        _print(message)
    else:
        time.sleep(GRACE)  # give the first one time to report


def _say_of_killed(who: str) -> None:
    time.sleep(GRACE / 2)  # a launcher on the same machine ends this process first, and reports more
    _print(killed_message(who))


def _print(message: str) -> None:
    path = _error_file()
    if path is not None:
        with contextlib.suppress(OSError):
            path.write_text(json.dumps({"message": message, "timestamp": int(time.time())}), encoding="utf-8")
    print(message, file=sys.stderr, flush=True)


def _first_on_this_machine() -> bool:
    """Return whether this process reports first on its machine, in a job without a process group yet."""
    path = _error_file()
    try:
        if path is not None:
            (path.parents[1] / "spoken").touch(exist_ok=False)
    except OSError as error:
        return not isinstance(error, FileExistsError)
    return True


def _error_file() -> Path | None:
    """Return the file where torch's launcher looks for an error, ATTEMPT/RANK/error.json; None without a launcher."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(name) if name else None


def _kept_alive(peer: socket.socket) -> socket.socket:
    """Make a connection close if the other machine vanishes: after two minutes, since networks may falter."""
    peer.settimeout(LONGEST)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6)):
            peer.setsockopt(socket.IPPROTO_TCP, option, value)
    return peer


def _in_background(work: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()
