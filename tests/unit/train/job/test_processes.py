"""Processes of a run: their number, the lock of its output, and its deadline."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from draftsmith.decode.errors import InputError
from draftsmith.train.job import lock, step_checks
from draftsmith.train.job.lock import lock_directory
from draftsmith.train.job.step_checks import Deadline

MANY_SHAPES = """
import sys, torch
from draftsmith.train.job.processes import join_launched

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def steps(shapes):
    for rows in shapes:
        with torch.autocast("cpu", torch.bfloat16):
            layer(torch.randn(rows, 64)).float().mean().backward()

torch.set_num_threads(1)
layer = torch.nn.Linear(64, 64)
with join_launched():
    steps(range(1, 41))
    before = resident()
    steps(range(41, 121))
    print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_steps_of_ever_new_shapes_do_not_fill_the_memory():
    done = subprocess.run([sys.executable, "-c", MANY_SHAPES], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 30e6  # 104 MB where a thousand kernels are kept


fork = multiprocessing.get_context("fork")


def holding(directory, held) -> None:
    with lock_directory(directory):
        held.set()
        time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    started = []

    def start():
        held = fork.Event()
        started.append(fork.Process(target=holding, args=(tmp_path, held)))
        started[0].start()
        assert held.wait(20)
        return started[0]

    yield start
    for process in started:
        process.kill()
        process.join()


def test_a_second_run_is_refused_by_the_name_of_the_first(tmp_path, holder):
    process = holder()
    begun = r"begun \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    expected = f"training.output_dir: expected a directory that no other run writes, found one at work in {tmp_path}: "
    with (
        pytest.raises(InputError, match=f"^{expected}process {process.pid} on {socket.gethostname()}, {begun}$"),
        lock_directory(tmp_path, "training.output_dir"),
    ):
        pass
    assert (tmp_path / lock.NAME).is_file()


def test_a_killed_run_keeps_nobody_out(tmp_path, holder):
    process = holder()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with lock_directory(tmp_path):
        assert str(os.getpid()) in (tmp_path / lock.NAME).read_text()
    assert not list(tmp_path.iterdir())


def test_the_lock_ends_with_the_block(tmp_path):
    with pytest.raises(KeyError), lock_directory(tmp_path / "new"):
        raise KeyError
    with lock_directory(tmp_path / "new"):
        pass
    with (
        lock_directory(tmp_path / "new"),
        pytest.raises(InputError, match=f"process {os.getpid()} on"),
        lock_directory(tmp_path / "new"),
    ):
        pass


class Line(torch.nn.Module):
    """A model of one number."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x, labels=None):
        """Return the squared error."""
        return {"loss": ((self.weight * x - labels) ** 2).mean()}


@pytest.mark.parametrize("strategy", ["epoch", "steps"])
def test_what_was_trained_until_a_checkpoint_counts_and_the_end_is_measured_and_saved_once(
    tmp_path, monkeypatch, strategy
):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(step_checks, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    measured = []

    class Counting(Trainer):
        def training_step(self, *args, **kwargs):
            clock.now += 4.0
            return super().training_step(*args, **kwargs)

        def evaluate(self, *args, **kwargs):
            measured.append(self.state.global_step)
            return super().evaluate(*args, **kwargs)

    def train(seconds, **resumed):
        args = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=1, num_train_epochs=3, report_to=[],
            save_strategy=strategy, eval_strategy=strategy, save_steps=4, eval_steps=4, disable_tqdm=True,
        )  # fmt: skip
        data = [{"x": float(x), "labels": 1.0} for x in range(4)]
        trainer = Counting(Line(), args, train_dataset=data, eval_dataset=data[:1])
        if seconds is not None:
            trainer.add_callback(Deadline(seconds))
        trainer.train(**resumed)
        return trainer.state.global_step

    assert train(18.0) == 5 and measured == [4, 5]
    state = json.loads((tmp_path / "checkpoint-4/trainer_state.json").read_text())
    assert state["stateful_callbacks"]["Deadline"]["attributes"] == {"trained": 16.0}
    measured.clear()
    clock.now += 500.0
    assert train(26.0, resume_from_checkpoint=str(tmp_path / "checkpoint-4")) == 7 and measured == [7]
    # One that was begun without a deadline may be resumed with one.
    kept = tmp_path / "checkpoint-4/trainer_state.json"
    del state["stateful_callbacks"]["Deadline"]
    kept.write_text(json.dumps(state))
    assert train(6.0, resume_from_checkpoint=str(tmp_path / "checkpoint-4")) == 6


@pytest.mark.parametrize(("strategy", "kept"), [("steps", True), ("epoch", False), ("no", False)])
def test_it_ends_with_the_first_step_after_its_time_and_is_measured_and_saved_as_others_are(
    monkeypatch, capsys, strategy, kept
):
    seconds = iter([100.0, 109.0, 111.0])
    monkeypatch.setattr(step_checks, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
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
    monkeypatch.setattr(step_checks, "time", SimpleNamespace(perf_counter=iter([0.0, 99.0]).__next__))
    args = SimpleNamespace(device=torch.device("cpu"), world_size=1, save_strategy="no", eval_strategy="no")
    callback, state, control = Deadline(10.0), TrainerState(max_steps=20, global_step=20), TrainerControl()
    callback.on_train_begin(args, state, control)
    callback.on_step_end(args, state, control)
    assert not control.should_training_stop and capsys.readouterr().err == ""
