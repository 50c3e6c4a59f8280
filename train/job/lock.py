"""A lock that lets one run at a time write in a directory."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import parse_json
from draftsmith.train.files import require_writable

NAME = ".lock"


@contextlib.contextmanager
def lock_directory(directory: Path, field: str = "output") -> Iterator[None]:
    """Keep other runs out of a directory while the block runs; the directory is made if it is missing.

    The kernel's lock ends with this process, even if it is killed. A disk without locks gives none. If another run
    writes there, the InputError names its process and host.
    """
    require_writable(directory, field=field).mkdir(parents=True, exist_ok=True)
    path = directory / NAME
    file = _locked_file(path, field)
    try:
        yield
    finally:
        if file is not None:
            path.unlink(missing_ok=True)  # before the lock is released: afterwards the file may be another run's
            file.close()


def _locked_file(path: Path, field: str) -> IO[str] | None:
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = _read(file.read())
            file.close()
            if not _is_gone(holder):
                who = f"process {holder.get('process')} on {holder.get('host')}, begun {holder.get('begun')}"
                raise InputError(
                    f"{field}: expected a directory that no other run writes, found one at work in {path.parent}: {who}"
                ) from None
            path.unlink(missing_ok=True)  # its child processes still hold the lock
            continue
        except OSError as error:
            file.close()
            if error.errno in {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}:
                return None
            raise
        # Another run may have unlinked the file between our open and our lock: then a third one could lock a new file
        # at this path. So the lock counts only if the path still leads to the locked file.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        file.close()  # the file was unlinked meanwhile: try again
    file.truncate(0)
    start = time.strftime("%Y-%m-%d %H:%M:%S")
    json.dump({"process": os.getpid(), "host": socket.gethostname(), "begun": start, "command": sys.argv}, file)
    file.flush()
    return file


def _read(text: str) -> dict[str, object]:
    try:
        holder = parse_json(text)
    except ValueError:  # the file was locked an instant ago and has no text yet
        holder = {}
    return holder if isinstance(holder, dict) else {}


def _is_gone(holder: dict[str, object]) -> bool:
    """Return whether the process that took a lock has surely ended; False for processes on other hosts."""
    process = holder.get("process")
    if holder.get("host") != socket.gethostname() or not isinstance(process, int):
        return False
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False
