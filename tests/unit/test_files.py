"""Files and directories are whole or not there, whatever happens while they are written."""

import pytest

from draftsmith.train.files import files_written_aside, write_aside, written_aside


def names(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_path_is_replaced_when_all_is_written(tmp_path, kind):
    path = tmp_path / "above" / "it"
    for text in ("first", "second"):
        with written_aside(path) as aside:
            assert aside.name == ".it.partial" and not aside.exists()
            if kind == "directory":
                aside.mkdir()
            (aside / "part" if kind == "directory" else aside).write_text(text)
            assert text == "first" or (path / "part" if kind == "directory" else path).read_text() == "first"
        assert names(path.parent) == ["it"]
        assert (path / "part" if kind == "directory" else path).read_text() == text


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path):
    path = tmp_path / "it"
    write_aside(path, "old")
    (tmp_path / ".it.partial").write_text("of a run that was killed")
    with pytest.raises(OSError, match="full"), written_aside(path) as aside:
        aside.write_text("ne")
        raise OSError("full")
    assert names(tmp_path) == ["it"] and path.read_text() == "old"
    with pytest.raises(TypeError):
        write_aside(path, None)
    assert names(tmp_path) == ["it"] and path.read_text() == "old"
    write_aside(path, b"new")
    assert path.read_bytes() == b"new"


def test_files_replace_their_namesakes_and_leave_the_others(tmp_path):
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "model").write_text("old")
    with pytest.raises(OSError, match="full"), files_written_aside(tmp_path) as aside:
        (aside / "model").write_text("ne")
        raise OSError("full")
    assert names(tmp_path) == ["kept", "model"] and (tmp_path / "model").read_text() == "old"
    with files_written_aside(tmp_path) as aside:
        (aside / "model").write_text("new")
        (aside / "more").mkdir()
    assert names(tmp_path) == ["kept", "model", "more"]
    assert (tmp_path / "model").read_text() == "new" and (tmp_path / "kept").read_text() == "kept"
