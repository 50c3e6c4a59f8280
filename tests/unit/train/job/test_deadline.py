"""A run of training that ends when its time is over."""

from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from draftsmith.train.job import deadline
from draftsmith.train.job.deadline import Deadline


@pytest.mark.parametrize(("strategy", "kept"), [("epoch", True), ("no", False)])
def test_it_ends_with_the_first_step_after_its_time_and_is_measured_and_saved_as_others_are(
    monkeypatch, capsys, strategy, kept
):
    seconds = iter([100.0, 109.0, 111.0])
    monkeypatch.setattr(deadline, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    args = SimpleNamespace(
        device=torch.device("cpu"), world_size=1, save_strategy=strategy, eval_strategy=strategy
    )  # fmt: skip
    callback, state = Deadline(10.0), TrainerState(max_steps=20)
    callback.on_train_begin(args, state, TrainerControl())
    controls = [TrainerControl(), TrainerControl()]
    for step, control in enumerate(controls, 1):
        state.global_step = step
        callback.on_step_end(args, state, control)
    assert [control.should_training_stop for control in controls] == [False, True]
    assert [control.should_save for control in controls] == [False, kept]
    assert [control.should_evaluate for control in controls] == [False, kept]
    assert "its 0:10 are over after step 2 of 20" in capsys.readouterr().err


def test_a_run_that_took_all_steps_has_not_ended_early(monkeypatch, capsys):
    monkeypatch.setattr(deadline, "time", SimpleNamespace(perf_counter=iter([0.0, 99.0]).__next__))
    args = SimpleNamespace(device=torch.device("cpu"), world_size=1, save_strategy="no", eval_strategy="no")
    callback, state, control = Deadline(10.0), TrainerState(max_steps=20, global_step=20), TrainerControl()
    callback.on_train_begin(args, state, control)
    callback.on_step_end(args, state, control)
    assert not control.should_training_stop and capsys.readouterr().err == ""
