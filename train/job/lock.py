"""A lock that lets one run at a time write in a directory."""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from draftsmith.decode.errors import InputError
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
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        expected = f"{field}: expected a directory that no other run writes"
        raise InputError(f"{expected}, found one at work in {directory}: {path.read_text('utf-8')}") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise
    begun = time.strftime("%Y-%m-%d %H:%M:%S")
    path.write_text(f"process {os.getpid()} on {socket.gethostname()}, begun {begun}", "utf-8")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock is released: afterwards the file may be another run's
        lock.release()
