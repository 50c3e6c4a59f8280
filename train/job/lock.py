"""One run at a time in a directory."""

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
def locked(directory: Path, field: str = "output") -> Iterator[None]:
    """Keep all other runs out of a directory, which is made if need be, while the block runs.

    By a lock of the kernel's, which ends with this process, even by a kill. On a disk that knows none there is none.

    Args:
        directory: what the run writes.
        field: the config field that named it, for the error message.

    Raises:
        InputError: it cannot be made or written in; or another run writes there: names its process and host.
    """
    require_writable(directory, field=field).mkdir(parents=True, exist_ok=True)
    path = directory / NAME
    file = _locked_file(path, field)
    try:
        yield
    finally:
        if file is not None:
            path.unlink(missing_ok=True)  # while nobody else can have it
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
            path.unlink(missing_ok=True)  # what it has started holds the lock still
            continue
        except OSError as error:
            file.close()
            if error.errno in {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}:
                return None
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        file.close()  # it was removed meanwhile
    file.truncate(0)
    start = time.strftime("%Y-%m-%d %H:%M:%S")
    json.dump({"process": os.getpid(), "host": socket.gethostname(), "begun": start, "command": sys.argv}, file)
    file.flush()
    return file


def _read(text: str) -> dict[str, object]:
    try:
        found = parse_json(text)
    except ValueError:  # it has been locked this instant
        found = {}
    return found if isinstance(found, dict) else {}


def _is_gone(holder: dict[str, object]) -> bool:
    """Say whether the process that took a lock has ended, as far as can be known from this host."""
    process = holder.get("process")
    if holder.get("host") != socket.gethostname() or not isinstance(process, int):
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
