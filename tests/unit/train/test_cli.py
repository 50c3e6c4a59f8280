"""How a command ends: its own code, or one line and a code that says whose fault it was."""

import errno
import io
import os
import signal
import sys

import pytest
import torch

from draftsmith.decode.errors import InputError
from draftsmith.scripts import cli
from draftsmith.train.cli import run
from draftsmith.train.data.shards import output_directory
from draftsmith.train.files import write_atomically


def raising(error: BaseException):
    def main() -> int:
        raise error

    return main


def noted(error: BaseException, note: str) -> BaseException:
    error.add_note(note)
    return error


AGAIN = "run the same command again"
MEMORY = "error: memory: expected enough for this run, found too little"
WAY_OUT = "; try a smaller batch, length or model"


@pytest.mark.parametrize(
    ("main", "code", "line"),
    [
        (lambda: None, 0, ""),
        (lambda: 3, 3, ""),
        (raising(InputError("limit: expected 1, found 0")), 2, "error: limit: expected 1, found 0"),
        (lambda: signal.raise_signal(signal.SIGINT), 130, f"interrupted: nothing was kept; {AGAIN}"),
        (raising(noted(KeyboardInterrupt(), "6 of 9 are kept")), 130, f"interrupted: 6 of 9 are kept; {AGAIN}"),
        (raising(BrokenPipeError()), 141, ""),
        (raising(MemoryError()), 2, MEMORY + WAY_OUT),
        (raising(MemoryError("Unable to allocate 3.00 GiB for an array")), 2, f"{MEMORY} for 3.00 GiB{WAY_OUT}"),
        (lambda: len(torch.empty(1 << 58)), 2, f"{MEMORY} for {1 << 60} bytes{WAY_OUT}"),
        (raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")), 2,
         f"{MEMORY} for 2.00 GiB{WAY_OUT}"),
        (raising(OSError(errno.ENOSPC, "No space left on device", "a/b")), 2,
         "error: output: expected to write a/b, found: No space left on device"),
        (raising(OSError(errno.EFBIG, "File too large", "a/b")), 2,
         "error: output: expected to write a/b, found: File too large"),
        (raising(OSError(errno.ENOSPC, "No space left on device")), 2,
         "error: output: expected to write standard output, found: No space left on device"),
    ],
)  # fmt: skip
def test_what_is_not_a_commands_fault_is_one_line(main, code, line, capsys):
    assert run(main) == code
    assert capsys.readouterr().err == (line and f"{line}\n")


@pytest.mark.parametrize("error", [FileNotFoundError("x"), RuntimeError("x"), ValueError("x")])
def test_what_is_ours_raises(error):
    with pytest.raises(type(error), match="x"):
        run(raising(error))


class Gone(io.StringIO):
    """A pipe that nobody reads."""

    def write(self, _: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_reader_that_left_or_was_never_there_is_no_failure(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Gone())
    assert [cli.main([flag]) for flag in ("--help", "--version")] == [141, 141]
    monkeypatch.setattr(sys, "stderr", Gone())
    assert run(raising(InputError("limit: expected 1, found 0"))) == 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_a_terminal_cannot_show_is_written_as_its_code(monkeypatch, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    assert run(lambda: print("τ 1.5 \N{WHITE HEAVY CHECK MARK}")) == 0
    assert stream.buffer.getvalue() == b"\\u03c4 1.5 \\u2705\n"


def test_an_interrupted_run_says_what_it_kept(tmp_path, capsys):
    def main() -> None:
        with output_directory(tmp_path / "out", lambda: "6 of 9 completions"):
            signal.raise_signal(signal.SIGINT)

    assert run(main) == 130
    assert capsys.readouterr().err == f"interrupted: 6 of 9 completions are kept in {tmp_path / 'out'}; {AGAIN}\n"


def test_a_disk_that_fills_up_leaves_the_file_that_was_there(tmp_path, monkeypatch, capsys):
    write_atomically(tmp_path / "report.json", "old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    assert run(lambda: write_atomically(tmp_path / "report.json", "new")) == 2
    written = tmp_path / "report.json"
    assert capsys.readouterr().err == f"error: output: expected to write {written}, found: No space left\n"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert (tmp_path / "report.json").read_text() == "old"
