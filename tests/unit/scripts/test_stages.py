"""Stages of a sweep: each runs once, and again after one that changed."""

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.scripts import stages
from draftsmith.scripts.stages import NO_GO, Stages
from draftsmith.train.cli import TERMINATED, Terminated, flags_of


@pytest.mark.parametrize(("code", "error"), [(1, InputError), (130, KeyboardInterrupt), (TERMINATED, Terminated)])
def test_a_stage_that_did_not_end_runs_again(tmp_path, monkeypatch, code, error):
    monkeypatch.setattr(stages.cli, "main", lambda argv: code)
    with pytest.raises(error):
        Stages(tmp_path).run("text", ["prepare"])
    ran = list[str]()
    monkeypatch.setattr(stages.cli, "main", lambda argv: ran.append(argv[0]) or NO_GO)  # a result
    for _ in range(2):
        Stages(tmp_path).run("text", ["prepare"])
    assert ran == ["prepare"]


def test_stages_run_again_after_one_that_changed(tmp_path, monkeypatch):
    ran, spent = list[str](), list[float]()
    monkeypatch.setattr(stages.cli, "main", lambda argv: ran.append(argv[0]) or 0)
    for rate in ("1", "1", "2"):
        sweep = Stages(tmp_path / "stages")
        (tmp_path / "old").mkdir(exist_ok=True)
        sweep.run("train", ["distill", rate], fresh=tmp_path / "old")
        assert sweep.call("sum", [1, 2], lambda rate=rate: ran.append("sum") or {3: rate}, dict[int, str]) == {3: rate}
        spent.append(sweep.spent)
    assert ran == ["distill", "sum"] * 2 and not (tmp_path / "old").exists()
    assert spent[0] == spent[1] > 0  # when it ran


def test_fields_become_flags_that_parsers_read_back(tmp_path):
    fields = {"target": tmp_path, "init.layers": 2, "share": 0.5, "packing": True, "heldout": ["a", "b"], "name": "no"}
    assert flags_of(fields) == [
        f"--target={tmp_path}", "--init.layers=2", "--share=0.5", "--packing=true", '--heldout=["a", "b"]', "--name=no",
    ]  # fmt: skip
