"""Stages of a long command: each runs once, and again after one that changed."""

import signal
import threading
import time
from types import SimpleNamespace

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.scripts import stages
from draftsmith.scripts.stages import Stages, flags_of, interrupt_after
from draftsmith.train.cli import TERMINATED, OutOfTime, Terminated


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
    monkeypatch.setattr(stages.time, "perf_counter", iter([0.0, 5.0, 10.0, 12.0, 20.0, 30.0, 40.0]).__next__)
    monkeypatch.setattr(stages.cli, "main", lambda argv: code)
    with pytest.raises(error):
        Stages(tmp_path).run("text", ["prepare"])
    monkeypatch.setattr(stages.cli, "main", lambda argv: 0)
    assert Stages(tmp_path).run("text", ["prepare"]) == 7.0
    assert Stages(tmp_path).run("text", ["prepare"]) == 7.0
    assert Stages(tmp_path).changed("text", ["prepare", "more"]) and not Stages(tmp_path).changed("text", ["prepare"])


def test_stages_run_again_after_one_that_changed(tmp_path, monkeypatch):
    ran, said = list[str](), list[float]()
    monkeypatch.setattr(stages.cli, "main", lambda argv: ran.append(argv[0]) or 0)
    for rate in ("1", "1", "2"):
        run = Stages(tmp_path)
        said.append(run.run("train", ["distill", rate]))
        run.run("report", ["measure"])
    assert ran == ["distill", "measure"] * 2
    assert said[0] == said[1] > 0  # what it took when it ran


@pytest.mark.parametrize("code", [None, TERMINATED])
def test_a_stage_that_takes_too_long_is_ended_and_later_ones_do_without_it(tmp_path, monkeypatch, code):
    def main(argv):
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            if code is None:
                raise
        return code

    run = Stages(tmp_path)
    monkeypatch.setattr(stages.cli, "main", main)
    with pytest.raises(OutOfTime):
        run.run("text", ["prepare"], most=0.01)
    assert run.unfinished("text") > 0 == run.unfinished("other")
    monkeypatch.setattr(stages.cli, "main", lambda argv: 0)
    run.run("train", ["distill"], most=60.0)
    assert Stages(tmp_path).unfinished("train") == 0
    ran = Stages(tmp_path)
    monkeypatch.setattr(stages.cli, "main", lambda argv: pytest.fail("it has ended"))
    assert ran.run("train", ["distill"]) > 0


def test_what_ends_in_time_is_not_interrupted():
    with interrupt_after(0.01):
        pass
    time.sleep(0.02)
    with pytest.raises(KeyboardInterrupt) as stop, interrupt_after(60.0):
        raise KeyboardInterrupt
    assert not isinstance(stop.value, OutOfTime)


def test_an_alarm_after_the_end_of_a_block_is_too_late(monkeypatch):
    """It comes just before it would be taken back."""
    own = signal.setitimer

    def late(which, seconds):
        if seconds == 0:
            signal.raise_signal(signal.SIGALRM)
        return own(which, seconds)

    monkeypatch.setattr(stages, "signal", SimpleNamespace(**vars(signal) | {"setitimer": late}))
    with interrupt_after(60.0):
        pass


def test_in_another_thread_nothing_is_interrupted():
    said = []

    def run():
        with interrupt_after(0.001):
            time.sleep(0.01)
        said.append("ended")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert said == ["ended"]


def test_what_a_stage_took_before_it_was_interrupted_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(stages.time, "perf_counter", iter([0.0, 7.0, 10.0, 20.0, 21.0, 30.0]).__next__)
    monkeypatch.setattr(stages.cli, "main", lambda argv: 130)
    with pytest.raises(KeyboardInterrupt):
        Stages(tmp_path).run("text", ["prepare"], most=9.0)
    left, own = [], stages.interrupt_after
    monkeypatch.setattr(stages, "interrupt_after", lambda most: left.append(most) or own(most))
    monkeypatch.setattr(stages.cli, "main", lambda argv: pytest.fail("its time is over"))
    run = Stages(tmp_path)
    with pytest.raises(OutOfTime):
        run.run("text", ["prepare"], most=7.0)
    monkeypatch.setattr(stages.cli, "main", lambda argv: 0)
    assert run.run("text", ["prepare"], most=9.0) == 7.0 + 10.0 and left == [2.0]
    assert Stages(tmp_path).run("text", ["prepare"], most=1.0) == 17.0  # it has ended


def test_a_no_go_is_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr(stages.cli, "main", lambda argv: 3)
    assert Stages(tmp_path).run("report", ["measure"]) >= 0


def test_fields_become_flags_that_parsers_read_back(tmp_path):
    fields = {"target": tmp_path, "init.layers": 2, "share": 0.5, "packing": True, "heldout": ["a", "b"], "name": "no"}
    assert flags_of(fields) == [
        f"--target={tmp_path}", "--init.layers=2", "--share=0.5", "--packing=true", '--heldout=["a", "b"]', "--name=no",
    ]  # fmt: skip
