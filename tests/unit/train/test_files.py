"""Files and directories are whole or not there, whatever happens while they are written."""

import errno
import os
import resource
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.decode.errors import InputError
from draftsmith.train.files import DISK_FULL, atomic_files, atomic_path, identity, require_writable, write_atomically


def names(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_path_is_replaced_when_all_is_written(tmp_path, kind):
    path = tmp_path / "above" / "it"
    for text in ("first", "second"):
        with atomic_path(path) as aside:
            assert aside.name == ".it.partial" and not aside.exists()
            if kind == "directory":
                aside.mkdir()
            (aside / "part" if kind == "directory" else aside).write_text(text)
            assert text == "first" or (path / "part" if kind == "directory" else path).read_text() == "first"
        assert names(path.parent) == ["it"]
        assert (path / "part" if kind == "directory" else path).read_text() == text


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path):
    path = tmp_path / "it"
    write_atomically(path, "old")
    (tmp_path / ".it.partial").write_text("of a run that was killed")
    with pytest.raises(OSError, match="full"), atomic_path(path) as aside:
        aside.write_text("ne")
        raise OSError("full")
    assert names(tmp_path) == ["it"] and path.read_text() == "old"
    with pytest.raises(TypeError):
        write_atomically(path, None)
    assert names(tmp_path) == ["it"] and path.read_text() == "old"
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_files_replace_their_namesakes_and_leave_the_others(tmp_path):
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "model").write_text("old")
    with pytest.raises(OSError, match="full"), atomic_files(tmp_path) as aside:
        (aside / "model").write_text("ne")
        raise OSError("full")
    assert names(tmp_path) == ["kept", "model"] and (tmp_path / "model").read_text() == "old"
    with atomic_files(tmp_path) as aside:
        (aside / "model").write_text("new")
        (aside / "more").mkdir()
    assert names(tmp_path) == ["kept", "model", "more"]
    assert (tmp_path / "model").read_text() == "new" and (tmp_path / "kept").read_text() == "kept"


def test_what_is_no_file_is_not_replaced_by_one(tmp_path):
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(tmp_path / "pipe", "piped")
    assert os.read(reader, 9) == b"piped" and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    os.close(reader)


def test_a_directory_that_cannot_be_written_in_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "taken" / "report.json").mkdir(parents=True)
    places = [tmp_path / name for name in ("file", "file/below", "loop/below", "x" * 300, "taken")]
    for place in (*places, Path("/proc/nowhere/x"), "", "a\0b"):
        with pytest.raises(InputError, match=r"^output: expected .*found") as error:
            require_writable(place, "report.json")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_takes_nothing_is_told_before_the_work(tmp_path, monkeypatch, code):
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(code, os.strerror(code))))
    with pytest.raises(InputError, match=rf"^json: expected a directory to write in .*{os.strerror(code)}$"):
        require_writable(tmp_path, field="json")


def test_a_directory_that_can_be_written_in_is_left_as_it_was(tmp_path):
    assert require_writable(tmp_path / "a" / "b", "report.json") == tmp_path / "a" / "b"
    assert names(tmp_path) == []
    (tmp_path / "a").mkdir()
    require_writable(tmp_path / "a" / "b")
    require_writable(tmp_path / "a")
    assert names(tmp_path) == ["a"] and names(tmp_path / "a") == []


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("writer", [lambda path, t: save_file({"t": t}, path), lambda path, t: torch.save(t, path)])
def test_a_limit_of_sizes_is_the_disks_own_error(tmp_path, writer):
    """Libraries have exceptions of their own for it."""
    weights = torch.zeros(100_000)
    with files_of_at_most(20_000), pytest.raises(OSError) as error, atomic_path(tmp_path / "it") as aside:
        writer(aside, weights)
    assert error.value.errno in DISK_FULL and error.value.filename == str(tmp_path / "it")
    assert names(tmp_path) == []


def test_a_directory_that_takes_no_files_is_not_left_there(tmp_path):
    with files_of_at_most(300), pytest.raises(InputError, match=r"^output: .*, found: File too large$"):
        require_writable(tmp_path / "above" / "out")
    assert names(tmp_path) == []


def test_a_hubs_model_is_known_by_its_commit(tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    for name, text in ((f"snapshots/{commit}/config.json", "{}"), ("refs/main", commit), ("refs/v1", "89" * 20)):
        write_atomically(tmp_path / "models--own--model" / name, text)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert identity("own/model") == identity("own/model", revision=commit) == {"commit": commit}
    with pytest.raises(OSError):
        identity("own/model", revision="v1")
    assert identity(str(tmp_path / "models--own--model" / "snapshots" / commit)).keys() == {"config.json"}


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("name", ["norm", "large"])
def test_a_model_is_known_by_each_of_its_tensors(name, suffix, tmp_path):
    """The file is so large that the places that are read of it miss both."""
    tensors = {
        "a": torch.zeros(3_100_000),
        "large": torch.zeros(20_000),
        "norm": torch.ones(64),
        "z": torch.zeros(3_000_000),
    }
    save = save_file if suffix == "safetensors" else torch.save
    file = tmp_path / "model" / f"pytorch_model.{suffix}"
    file.parent.mkdir()
    save(tensors, file)
    known = identity(str(file.parent))
    assert identity(str(shutil.copytree(file.parent, tmp_path / "copy"))) == known
    save(tensors | {name: tensors[name] + 1}, file)
    changed = identity(str(file.parent))
    assert changed.keys() == known.keys() and [key for key in known if changed[key] != known[key]] == ["tensor_digest"]
    file.write_bytes(b"\xff" * 100)
    assert identity(str(file.parent)) != known
