"""Atomic writing: a file is written under another name, then renamed, so that no reader sees half of it.

`identity` tells models apart. All of it needs the standard library alone, and the hub's client for a model there.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from draftsmith.decode.errors import InputError

DISK_FULL = {errno.ENOSPC: "no space left", errno.EDQUOT: "no space left", errno.EFBIG: "files may grow no larger"}
"""Errors of a full disk, in words."""


def disk_full_error(error: Exception) -> OSError | None:
    """Return the OSError of a full disk, or None if the error has another cause."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return error
    # safetensors and torch.save raise exceptions of their own, with the system's text or only a hint of the failure.
    code = next((code for code in DISK_FULL if os.strerror(code) in str(error)), None)
    if code is None and re.search("PytorchStreamWriter failed|inline_container.*unexpected pos", str(error)):
        code = errno.ENOSPC
    return None if code is None else OSError(code, os.strerror(code))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise the errors of a disk as OSErrors that name the file being written."""
    try:
        yield
    except Exception as error:
        refused = disk_full_error(error) or error
        if isinstance(refused, OSError) and refused.errno is not None:  # a full disk names no file
            refused.filename = refused.filename or str(path)
        if refused is error:
            raise
        raise refused from error


def require_writable(path: str | Path, *files: str, field: str = "output") -> Path:
    """Require, before the work, that a directory can be made and written in and that no name in `files` is a directory.

    A trial file is written and removed again. `field` is the config field that named the directory. Return its path.
    """
    directory = Path(path)
    trial = directory / ".writable.partial"
    try:
        if not str(path):
            raise ValueError("an empty path")
        made = [above for above in (directory, *directory.parents) if not above.exists()]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            trial.write_bytes(b"x" * 4096)
        finally:
            for remove_made in (trial.unlink, *(new.rmdir for new in made)):
                with suppress(OSError):  # another run may try the same
                    remove_made()
        directories = [directory / name for name in files if (directory / name).is_dir()]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{field}: expected a directory to write in at {path}, found: {reason}") from error
    if directories:
        raise InputError(f"{field}: expected a file or nothing at {directories[0]}, found a directory")
    return directory


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path, `.NAME.partial`, for a file or directory, and rename it to `path` when the block ends.

    Parent folders are made, and what exists at `path` is replaced. If the block raises, what it wrote is removed and
    `path` stays as it was.
    """
    aside = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(aside)
    try:
        with _naming(path):
            yield aside
            replace_path(aside, path)
    finally:
        remove(aside)


@contextmanager
def atomic_files(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory; when the block ends, its files replace those of the same name in `directory`."""
    aside = directory / ".files.partial"
    remove(aside)
    aside.mkdir(parents=True)
    try:
        with _naming(directory):
            yield aside
            for path in aside.iterdir():
                replace_path(path, directory / path.name)
    finally:
        remove(aside)


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write a file atomically, flushed to the disk.

    A link is followed, and a device or a pipe is written to directly: neither is replaced by a file. After an OSError
    no partial file remains.
    """
    content = data.encode() if isinstance(data, str) else data
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(content)
        return
    with atomic_path(path) as aside, aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_path(new: Path, path: Path) -> None:
    """Rename a file or directory to `path`, and remove what was there."""
    if new.is_dir() and path.is_dir():
        # No system call replaces a full directory. After a kill between the renames `.NAME.old` holds the old one.
        old = path.with_name(f".{path.name}.old")
        remove(old)
        path.rename(old)
        new.rename(path)
        remove(old)
    else:
        os.replace(new, path)


def move_link(link: Path, directory: str) -> None:
    """Point a link to another directory atomically."""
    aside = link.with_name(f".{link.name}.new")
    aside.unlink(missing_ok=True)
    aside.symlink_to(os.path.abspath(directory), target_is_directory=True)
    os.replace(aside, link)


def remove(path: Path) -> None:
    """Remove a file, or a directory with its contents, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def is_gguf(model: str | Path) -> bool:
    """Return whether a model is named by a GGUF file, not by a directory or a hub id."""
    return str(model).lower().endswith(".gguf")


def identity(model: str, weights: bool = True, revision: str | None = None) -> dict[str, Any]:
    """Return a fingerprint of a model's configs and, with `weights`, its weights; a hub id's is its commit.

    Weights are sampled in each file and in each tensor, because reading hundreds of gigabytes takes too long.
    """
    directory = Path(model)
    if not directory.is_dir() and not is_gguf(model):
        from huggingface_hub import hf_hub_download

        return {"commit": Path(hf_hub_download(model, "config.json", revision=revision)).parent.name}
    digests: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        if (directory / name).is_file():
            digests[name] = hashlib.sha256((directory / name).read_bytes()).hexdigest()
    patterns = ("*.safetensors", "pytorch_model*.bin", "*lm_head*.pt") if weights else ()
    tensors = hashlib.sha256()
    found = sorted(file for pattern in patterns for file in directory.glob(pattern))
    for file in [directory] if is_gguf(model) else found:
        size, digest = file.stat().st_size, hashlib.sha256()
        with file.open("rb") as content:
            for sample in range(64):
                content.seek(size * sample // 64)
                digest.update(content.read(1 << 16))
        digests[file.name] = {"bytes": size, "sampled_sha256": digest.hexdigest()}
        with suppress(ValueError, LookupError, TypeError, AttributeError, BadZipFile):  # those who load it name a fault
            for part in _parts_of_tensors(file, size):
                tensors.update(part)
        digests["tensor_digest"] = tensors.hexdigest()  # not among the file's: fingerprints of earlier versions lack it
    return digests


def _parts_of_tensors(file: Path, size: int) -> Iterator[bytes]:
    """Yield small tensors whole, the middle and the end of large ones, and the checksums that torch's format has.

    A GGUF file is sampled every 64 KiB, as its header takes long to read.
    """
    if is_gguf(file):
        with file.open("rb") as content:
            for at in range(0, size, 1 << 16):
                content.seek(at)
                yield content.read(512)
        return
    if file.suffix != ".safetensors":
        with ZipFile(file) as archive:
            yield repr([(part.filename, part.CRC) for part in archive.infolist()]).encode()
        return
    with file.open("rb") as content:
        start = 8 + min(size, int.from_bytes(content.read(8), "little"))
        header = json.loads(content.read(start - 8))
        for begin, end in sorted(header[name]["data_offsets"] for name in header.keys() - {"__metadata__"}):
            whole, middle = end - begin <= 1 << 16, (begin + end) // 2
            for at, stop in [(begin, end)] if whole else [(middle, middle + 4096), (end - 4096, end)]:
                content.seek(start + at)
                yield content.read(stop - at)
