"""The time for the first amount of text is dealt out among candidates."""

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.scripts.choose import command
from draftsmith.scripts.choose.config import ChooseConfig
from draftsmith.scripts.choose.forecast import Trial
from draftsmith.scripts.choose.run import COSTS, ChooseRun
from draftsmith.scripts.choose.schedule import Pace
from draftsmith.scripts.stages import Stages
from draftsmith.train.cli import OutOfTime


def choosing(tmp_path, monkeypatch, took) -> ChooseRun:
    """A run of 100 seconds for first trials, in which each takes the given seconds, or fails."""
    config = ChooseConfig(target="t", prompts="p", output=str(tmp_path), budget=f"{200 / (1 - COSTS)}s")
    commands = {"slow": "distill", "heads": "medusa", "other": "distill"}
    run = ChooseRun(config, {name: {"command": commands[name]} for name in took}, tmp_path, [], Stages(tmp_path))
    run.used, run.written = 1, 100.0

    def trial(self, name, rung, until):
        seconds = took[name]
        if isinstance(seconds, Exception):
            raise seconds
        self.spend("training", min(seconds, until - self.spent))
        if self.spent >= until:
            raise OutOfTime
        return Trial(name, 100, seconds, {}), Pace(seconds / 100, 0.0)

    monkeypatch.setattr(ChooseRun, "trial", trial)
    return run


def test_a_slow_candidate_leaves_time_for_one_of_each_other_command(tmp_path, monkeypatch):
    run = choosing(tmp_path, monkeypatch, {"slow": 90.0, "heads": 20.0, "other": 25.0})
    assert run.rung(1, ["slow", "heads", "other"]) == ["heads", "other"]
    assert run.failed.keys() == {"slow"} and run.ledger == {"training": 95.0}


def test_a_later_amount_has_all_of_the_time(tmp_path, monkeypatch):
    run = choosing(tmp_path, monkeypatch, {"slow": 80.0, "heads": 10.0})
    assert run.rung(2, ["slow", "heads"]) == ["slow", "heads"]


@pytest.mark.parametrize("names", [["slow", "heads"], ["heads", "slow"]])
def test_an_error_ends_the_choice_only_where_every_training_failed(tmp_path, monkeypatch, names):
    run = choosing(tmp_path, monkeypatch, {"slow": 900.0, "heads": InputError("heads: expected some")})
    assert run.rung(1, names) == [] and run.failed.keys() == {"slow", "heads"}
    run = choosing(tmp_path, monkeypatch, {"slow": InputError("slow: bad"), "heads": InputError("heads: bad")})
    with pytest.raises(InputError, match=names[-1]):
        run.rung(1, names)


def test_the_plan_counts_the_candidates_that_were_tried(tmp_path, monkeypatch):
    """Of six two had no time: of the four that were tried half go on, and no more are paid for."""
    seen = []
    run = choosing(tmp_path, monkeypatch, {"slow": 1.0})
    run.candidates = {str(number): {"command": "distill"} for number in range(6)}
    run.paces = {str(number): Pace(0.001, 0.0) for number in range(6)}
    monkeypatch.setattr(ChooseRun, "rung", lambda self, rung, names: names[:4])
    monkeypatch.setattr(command, "_costs", lambda run: {})
    monkeypatch.setattr(command, "_chosen", lambda run, tables: "chosen")
    monkeypatch.setattr(command, "begins", lambda left, rung, written, paces, candidates, *_: seen.append(candidates))
    assert command._halve(run) == "chosen" and seen == [4]
