"""Programs on disk."""

import pytest
import torch

from draftsmith.decode.cache import program
from draftsmith.decode.rules import judged


def test_a_program_that_is_not_on_disk_is_not_compiled_where_nothing_may_be(tmp_path, monkeypatch):
    monkeypatch.setenv(program.FOLDER, str(tmp_path))
    monkeypatch.setattr(judged, "_PROGRAMS", {})
    wanted = r"compiled: expected the program of the rule for sampling in .*"
    with program.nothing_compiled(), pytest.raises(program.NotCompiled, match=wanted):
        judged.drawn_tokens(torch.zeros(1, 5), 1.0, torch.zeros(1))
    assert program._may_compile and not list(tmp_path.iterdir())
