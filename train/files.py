"""Files of ours are written aside, then renamed: no reader sees half of one."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from draftsmith.decode.errors import InputError

NO_ROOM = {errno.ENOSPC: "no space left", errno.EDQUOT: "no space left", errno.EFBIG: "files may grow no larger"}
"""What a disk says that takes no more, in words."""


def no_room(error: Exception) -> OSError | None:
    """Return the error of a disk that takes no more; None where it is another.

    safetensors' and torch.save's exceptions are none of the system's: they have its text, or say that they failed.
    """
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return error
    found = next((code for code in NO_ROOM if os.strerror(code) in str(error)), None)
    if found is None and re.search("PytorchStreamWriter failed|inline_container.*unexpected pos", str(error)):
        found = errno.ENOSPC
    return None if found is None else OSError(found, os.strerror(found))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise a disk's errors as what they are, with the file that was written."""
    try:
        yield
    except Exception as error:
        refused = no_room(error) or error
        if isinstance(refused, OSError) and refused.errno is not None:  # a full disk names no file
            refused.filename = refused.filename or str(path)
        if refused is error:
            raise
        raise refused from error


def require_writable(path: str | Path, *files: str, field: str = "output") -> Path:
    """Return a directory, and see that it can be made and files written there: before the work, not after it.

    What it makes to see that is gone when it returns.

    Args:
        path: where.
        files: names of what will be written, none of which may be a directory.
        field: the config field that named it, for the error message.

    Raises:
        InputError: it cannot be made or written in, or there is no space.
    """
    directory = Path(path)
    tried = directory / ".writable.partial"
    try:
        if not str(path):
            raise ValueError("an empty path")
        made = [above for above in (directory, *directory.parents) if not above.exists()]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            tried.write_bytes(b"x" * 4096)
        finally:
            for remove_made in (tried.unlink, *(new.rmdir for new in made)):
                with suppress(OSError):  # another run may try the same
                    remove_made()
        taken = [directory / name for name in files if (directory / name).is_dir()]
    except (OSError, ValueError) as error:
        found = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{field}: expected a directory to write in at {path}, found: {found}") from error
    if taken:
        raise InputError(f"{field}: expected a file or nothing at {taken[0]}, found a directory")
    return directory


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Give a path to write a file or a directory at, and rename it to `path` when the block ends well.

    It lies beside `path` as `.NAME.partial`, with nothing there; folders above are made. A file or directory at `path`
    is replaced. Where the block raises, what it wrote is removed, and `path` is as it was.
    """
    aside = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(aside)
    try:
        with _naming(path):
            yield aside
            move_over(aside, path)
    finally:
        remove(aside)


@contextmanager
def files_written_aside(directory: Path) -> Iterator[Path]:
    """Give a new directory to write files in; when the block ends well, each replaces its namesake in `directory`.

    Other files there stay.
    """
    aside = directory / ".files.partial"
    remove(aside)
    aside.mkdir(parents=True)
    try:
        with _naming(directory):
            yield aside
            for path in aside.iterdir():
                move_over(path, directory / path.name)
    finally:
        remove(aside)


def write_aside(path: Path, data: str | bytes) -> None:
    """Write a file aside, on the disk and not only in its cache, then rename it.

    A link is followed, and a device or a pipe written to as it is: neither is replaced by a file.

    Raises:
        OSError: the disk is full, or cannot be written; nothing is left behind.
    """
    content = data.encode() if isinstance(data, str) else data
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(content)
        return
    with written_aside(path) as aside, aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def move_over(new: Path, path: Path) -> None:
    """Rename a file or directory to `path`, and remove what was there.

    A directory there goes by way of `.NAME.old`, where it is still whole after a kill between the two renames.
    """
    if new.is_dir() and path.is_dir():
        old = path.with_name(f".{path.name}.old")
        remove(old)
        path.rename(old)
        new.rename(path)
        remove(old)
    else:
        os.replace(new, path)


def move_link(link: Path, directory: str) -> None:
    """Let a link point to another directory; whoever opens it finds the one or the other."""
    aside = link.with_name(f".{link.name}.new")
    aside.unlink(missing_ok=True)
    aside.symlink_to(os.path.abspath(directory), target_is_directory=True)
    os.replace(aside, link)


def remove(path: Path) -> None:
    """Remove a file, or a directory with all that it holds; do nothing where there is none."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
