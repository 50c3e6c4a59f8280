"""Stages of a long command: each runs once, and again behind one that changed."""

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.scripts import stages
from draftsmith.scripts.stages import Stages, flags_of
from draftsmith.train.cli import Terminated


def test_a_stage_that_failed_is_not_taken_for_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(stages.cli, "main", lambda argv: 1)
    with pytest.raises(InputError, match=r"text: expected the stage to end, found exit code 1"):
        Stages(tmp_path).run("text", ["prepare"])
    ran = list[str]()
    monkeypatch.setattr(stages.cli, "main", lambda argv: ran.append(argv[0]) or 0)
    Stages(tmp_path).run("text", ["prepare"])
    assert ran == ["prepare"]


@pytest.mark.parametrize(("code", "error"), [(130, KeyboardInterrupt), (143, Terminated)])
def test_an_interrupted_stage_interrupts_and_its_time_counts(tmp_path, monkeypatch, code, error):
    monkeypatch.setattr(stages.time, "perf_counter", iter([0.0, 5.0, 10.0, 12.0]).__next__)
    monkeypatch.setattr(stages.cli, "main", lambda argv: code)
    with pytest.raises(error):
        Stages(tmp_path).run("text", ["prepare"])
    monkeypatch.setattr(stages.cli, "main", lambda argv: 0)
    assert Stages(tmp_path).run("text", ["prepare"]) == 7.0
    assert Stages(tmp_path).run("text", ["prepare"]) == 7.0
    assert Stages(tmp_path).changed("text", ["prepare", "more"]) and not Stages(tmp_path).changed("text", ["prepare"])


def test_stages_run_again_behind_one_that_changed(tmp_path, monkeypatch):
    ran, said = list[str](), list[float]()
    monkeypatch.setattr(stages.cli, "main", lambda argv: ran.append(argv[0]) or 0)
    for rate in ("1", "1", "2"):
        run = Stages(tmp_path)
        said.append(run.run("train", ["distill", rate]))
        run.run("report", ["measure"])
    assert ran == ["distill", "measure"] * 2
    assert said[0] == said[1] > 0  # what it took when it ran


def test_a_no_go_is_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr(stages.cli, "main", lambda argv: 3)
    assert Stages(tmp_path).run("report", ["measure"]) >= 0


def test_fields_become_flags_that_parsers_read_back(tmp_path):
    fields = {"target": tmp_path, "init.layers": 2, "share": 0.5, "packing": True, "heldout": ["a", "b"], "name": "no"}
    assert flags_of(fields) == [
        f"--target={tmp_path}", "--init.layers=2", "--share=0.5", "--packing=true", '--heldout=["a", "b"]', "--name=no",
    ]  # fmt: skip
