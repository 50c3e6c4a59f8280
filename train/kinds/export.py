"""What exports of all kinds of drafters share: formats, where they are written, and what an engine is told."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from draftsmith.decode.errors import InputError
from draftsmith.train.files import require_writable, written_aside


@dataclass(frozen=True)
class Served:
    """A drafter as vLLM is to use it."""

    name: str
    """In messages."""
    speculative: Mapping[str, Any]
    """Its `speculative_config`."""

    @property
    def draft_length(self) -> int:
        """γ."""
        return int(self.speculative["num_speculative_tokens"])


def check_format(format: str, expected: Sequence[str]) -> str:
    """Return the name of a format, or raise an InputError that names those there are."""
    if format not in expected:
        raise InputError(f"format: expected one of {', '.join(expected)}, found {format!r}")
    return format


def check_output(directory: Path) -> None:
    """Require that a directory is new or empty, and that one can be written beside it.

    Raises:
        InputError: it holds something, is no directory but a file or a link, or the disk does not take it.
    """
    if os.path.lexists(directory) and (directory.is_symlink() or not directory.is_dir() or any(directory.iterdir())):
        found = "is a link" if directory.is_symlink() else "holds something"
        raise InputError(f"output: expected a new or empty directory, found {directory}, which {found}")
    require_writable(directory)


@contextmanager
def put_in_place(directory: Path) -> Iterator[Path]:
    """Give a directory to write in that takes the place of another when all went well, and is removed otherwise."""
    check_output(directory)
    try:
        with written_aside(directory.absolute()) as aside:
            aside.mkdir()
            yield aside
    except (OSError, SafetensorError) as error:
        found = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        raise InputError(f"output: expected to write in {directory}, found: {found}") from error
