"""Training on states from servers: what is learned, what is on the disk, and what fails on the way."""

import errno
import fcntl
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import (
    LAST_BITS,
    block_configured,
    configured,
    eagle_configured,
    furthest,
    heads_configured,
    history,
    mtp_configured,
)
from process_jobs import eagled
from processes import forked
from safetensors.torch import load_file
from state_server import StateServer, serving
from torch import nn

from draftsmith.decode.errors import InputError
from draftsmith.distill.__main__ import distill
from draftsmith.medusa import __main__ as medusa
from draftsmith.medusa.block import __main__ as block
from draftsmith.medusa.eagle import __main__ as eagle
from draftsmith.medusa.mtp import __main__ as mtp
from draftsmith.train.job.lock import lock_directory
from draftsmith.train.models import load_model
from draftsmith.train.teacher import served_check
from draftsmith.train.teacher.feature_shards import FeatureShards
from draftsmith.train.teacher.served_window import ALIVE, ERROR, Filling, ServedWindow, fill_window
from draftsmith.train.trainer import RecipeTrainer

WINDOW = 4e-4
TRAINING = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 2}
TRAINING |= {"logging_steps": 1, "train_sampling_strategy": "group_by_length"}
KINDS = {
    "EAGLE-3": (eagle.train_heads, eagle_configured, {"layer_ids": [1, 2]}),
    "blocks, packed and cut": (
        block.train_block,
        block_configured,
        {"layer_ids": [0, 1], "packing": True, "max_length": 40},
    ),
    "Hydra, workers that read ahead": (
        medusa.train_heads,
        heads_configured,
        {"hydra": True, "training": {"dataloader_num_workers": 1, "gradient_accumulation_steps": 2}},
    ),
    "MTP layers, without the last batch": (
        mtp.train_heads,
        mtp_configured,
        {"num_steps": 2, "training": {"dataloader_drop_last": True, "per_device_train_batch_size": 8}},
    ),
    "a draft model": (distill, configured, {}),
}


@pytest.fixture(scope="module")
def model(pipeline):
    return load_model(pipeline / "target", device="cpu")


class InThread:
    """A filler without a process of its own, which takes seconds to start."""

    def __init__(self, filling: Filling):
        self.going = True
        self.thread = threading.Thread(target=self.fill, args=(filling,), daemon=True)
        self.thread.start()

    def fill(self, filling: Filling) -> None:
        with suppress(Exception):
            fill_window(filling, lambda: self.going)

    def terminate(self) -> None:
        self.going = False

    def join(self, seconds: float | None = None) -> None:
        self.thread.join(seconds)

    kill = terminate


@pytest.fixture(autouse=True)
def in_thread(request, monkeypatch) -> None:
    def start(window: ServedWindow) -> None:
        if window.process is None:
            window.directory.mkdir(parents=True, exist_ok=True)
            (window.directory / ERROR).unlink(missing_ok=True)
            window.process = InThread(window.filling)

    def alive(window: ServedWindow) -> None:
        if (file := window.directory / ERROR).exists():
            raise InputError(file.read_text())

    if "slow" not in request.keywords:
        monkeypatch.setattr(ServedWindow, "start", start)
        monkeypatch.setattr(ServedWindow, "require_written", alive)


def server(pipeline, model, **faults: object) -> StateServer:
    return StateServer(model, [1, 2], str(pipeline / "target"), **faults)


def trained(pipeline, output: Path, *servers: StateServer, kind: str = "EAGLE-3", **options: object):
    """A run on servers, or on the target itself without any."""
    train, config, own = KINDS[kind]
    options = {"heldout": [str(pipeline / "heldout")], "target_dtype": "float32"} | own | options
    options["training"] = TRAINING | own.get("training", {}) | options.get("training", {})
    if servers:
        options |= {"teacher": ["vllm:" + ",".join(each.url for each in servers)], "teacher_window": WINDOW}
    return train(config(pipeline, output, **options))


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in trainer.model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_what_it_learns_from_the_target(pipeline, model, tmp_path, kind):
    """Over more than one epoch, with evaluations on the servers' states of held-out text."""
    live = trained(pipeline, tmp_path / "live", kind=kind)
    with serving(server(pipeline, model)) as (states,):
        found = trained(pipeline, tmp_path / "found", states, kind=kind)
    assert found.state.epoch > 1 or kind == "blocks, packed and cut"
    assert history(found, "loss") == pytest.approx(history(live, "loss"), rel=1e-4)
    metric = "eval_mean_acceptance_length"
    assert history(found, metric) == pytest.approx(history(live, metric), rel=1e-4) and history(live, metric)
    assert furthest(weights(found), weights(live)) < LAST_BITS
    assert not (tmp_path / "found" / "teacher").exists()


def test_a_server_that_dies_changes_nothing(pipeline, model, tmp_path, capfd):
    with serving(server(pipeline, model), server(pipeline, model)) as states:
        whole = trained(pipeline, tmp_path / "whole", *states)
    assert "Training waited" in (printed := capfd.readouterr().err) and "until it answers" not in printed
    with serving(server(pipeline, model), server(pipeline, model, dies_after=12)) as (first, second):
        rest = trained(pipeline, tmp_path / "rest", first, second)
    assert not second.alive and len(second.texts) == 12
    assert re.search(f"{second.url}/.*; it is asked again until it answers\n", capfd.readouterr().err)
    assert furthest(weights(rest), weights(whole)) == 0


def test_the_window_is_never_exceeded(pipeline, model, tmp_path):
    most, ended, folder = [0], threading.Event(), tmp_path / "memory"

    def watch() -> None:
        while not ended.wait(0.002):
            found = 0
            for file in [*folder.glob("rank-0/*.parquet"), *folder.glob("rank-0/.*.parquet.partial")]:
                with threading.Lock():
                    try:
                        found += file.stat().st_size
                    except FileNotFoundError:
                        continue
            most[0] = max(most[0], found)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with serving(server(pipeline, model)) as (states,):
            trained(pipeline, tmp_path / "out", states, teacher_directory=str(folder))
    finally:
        ended.set()
        watching.join()
    assert WINDOW * 1e9 / 2 < most[0] <= WINDOW * 1e9
    assert not folder.exists()


def test_a_folder_of_states_is_one_runs(pipeline, model, tmp_path):
    folder = tmp_path / "memory"
    (tmp_path / "file").write_text("")
    with serving(server(pipeline, model)) as (states,):
        with (
            lock_directory(folder / "rank-0"),
            pytest.raises(InputError, match="teacher_directory: expected a directory that no other run writes"),
        ):
            trained(pipeline, tmp_path / "out", states, teacher_directory=str(folder))
        with pytest.raises(InputError, match="teacher_directory: expected a directory to write in at"):
            trained(pipeline, tmp_path / "out", states, teacher_directory=str(tmp_path / "file"))
        assert not states.answered


def test_a_run_that_resumes_asks_for_nothing_twice(pipeline, model, tmp_path):
    """It goes on from its checkpoint, with the texts that a killed run had left."""
    saving = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "linear"}
    whole = trained(pipeline, tmp_path / "whole", training=saving)
    with serving(server(pipeline, model)) as (states,):
        with pytest.raises(Stop):
            stopped(pipeline, tmp_path / "run", states, training=saving)
        kept = {file.name for file in (tmp_path / "run" / "teacher" / "rank-0").glob("*.parquet")}
        before = len(states.texts)
        rest = trained(pipeline, tmp_path / "run", states, training=saving)
        asked = states.texts[before:]
    assert kept and len(asked) < before
    assert history(rest, "loss") == pytest.approx(history(whole, "loss"), rel=1e-4)
    assert furthest(weights(rest), weights(whole)) < LAST_BITS


def test_texts_are_cut_before_the_first_step_too(pipeline, model, tmp_path):
    options = {"max_length": 12, "heldout": [], "training": {"max_steps": 1, "eval_strategy": "no"}}
    with serving(server(pipeline, model)) as (states,):
        trained(pipeline, tmp_path / "out", states, **options)
    assert max(map(len, states.texts)) == 12


@pytest.mark.parametrize("option", ["ignore_data_skip", "dataloader_persistent_workers"])
def test_orders_that_a_window_cannot_follow_are_refused(pipeline, model, tmp_path, option):
    options = {"training": {option: True, "dataloader_num_workers": 1}}
    with serving(server(pipeline, model)) as (states,), pytest.raises(InputError, match=f"training.{option}: expected"):
        trained(pipeline, tmp_path / "out", states, **options)


def test_embeddings_are_where_the_heads_learn(pipeline, model, tmp_path, monkeypatch):
    moved, to = list[nn.Module](), nn.Embedding.to
    monkeypatch.setattr(nn.Embedding, "to", lambda module, *place: moved.append(module) or to(module, *place))
    options = {"heldout": [], "training": {"max_steps": 1, "eval_strategy": "no"}}
    with serving(server(pipeline, model)) as (states,):
        for number, kind in enumerate(["EAGLE-3", "Hydra, workers that read ahead"]):
            assert trained(pipeline, tmp_path / f"{number}", states, kind=kind, **options).embed in moved


CHANGES = {
    "other layers": ({"layer_ids": [0]}, {}),
    "another target": ({}, {"files": None, "commit": "another"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_states_that_another_run_left_are_not_read(pipeline, model, tmp_path, change, monkeypatch):
    monkeypatch.setitem(served_check.SHARES, torch.float32, 2.0)
    (options, says), rest = CHANGES[change], {"kind": "blocks, packed and cut", "resume": False, "layer_ids": [1]}
    rest |= {"init": "last_layers", "packing": False, "max_length": None, "source_weights": [1, 1], "heldout": []}
    rest |= {"training": {"train_sampling_strategy": "random", "eval_strategy": "no"}}
    fresh = trained(pipeline, tmp_path / "fresh", **rest)
    with serving(server(pipeline, model)) as (states,):
        states.says, states.fault = says, (lambda states, ids: (states * 2, ids)) if says else None
        with pytest.raises(Stop):
            stopped(pipeline, tmp_path / "run", states, **rest | options)
        assert list((tmp_path / "run" / "teacher" / "rank-0").glob("*.parquet"))
        states.says, states.fault = {}, None
        found = trained(pipeline, tmp_path / "run", states, **rest)
    assert history(found, "loss") == pytest.approx(history(fresh, "loss"), rel=1e-4)


class Stop(Exception):
    """What ends a run in its middle."""


def stopped(pipeline, output: Path, states: StateServer, **options: object) -> None:
    def step(self, *arguments: object, **more: object):
        if self.state.global_step == 4:
            window = self.data_collator.index.window
            window.process.kill()  # as a killed trainer's would end
            window.process.join()
            raise Stop
        return training_step(self, *arguments, **more)

    trainer: Any = RecipeTrainer
    training_step = trainer.training_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "training_step", step)
        trained(pipeline, output, states, **options)


FAULTS = {
    "states that are no numbers": (
        {"fault": lambda states, ids: (states.index_fill(0, torch.tensor([0]), torch.nan), ids)},
        "finite, found NaN",
    ),
    "another revision": (
        {"fault": lambda states, ids: (states + states.std() * torch.randn(states.shape), ids)},
        "as the library computes them, found others",
    ),
    "layers that it does not give": ({"layer_ids": [2]}, "states after the layers 1, 2 .* found those after 2"),
    "too short a context": ({"says": {"max_model_len": 8}}, "samples of at most 8 tokens"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_server_is_named_before_the_first_step(pipeline, model, tmp_path, fault):
    options, line = FAULTS[fault]
    wrong = StateServer(**{"model": model, "layer_ids": [1, 2], "path": str(pipeline / "target")} | options)
    with serving(wrong), pytest.raises(InputError, match=line) as error:
        trained(pipeline, tmp_path / "out", wrong)
    assert "\n" not in str(error.value)
    assert fault != "layers that it does not give" or not (tmp_path / "out" / "teacher").exists()


def test_a_server_that_goes_wrong_later_ends_the_run(pipeline, model, tmp_path):
    wrong = server(pipeline, model)
    wrong.fault = lambda states, ids: (states * (torch.nan if wrong.answered > 20 else 1.0), ids)
    with serving(wrong), pytest.raises(InputError, match="finite, found NaN or infinity"):
        trained(pipeline, tmp_path / "out", wrong)


def test_a_full_disk_is_one_line_and_keeps_what_is_there(pipeline, model, tmp_path):
    write, written = FeatureShards.write, []

    def full(self, path: Path, *arguments: object) -> None:
        if len(written) >= 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, path, *arguments)
        written.append(path.name)

    line = r"expected 0.0004 GB of space in .*rank-0 for states .*, found the disk full; give another teacher_directory"
    with serving(server(pipeline, model)) as (states,):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError, match=line) as error:
            patch.setattr(FeatureShards, "write", full)
            trained(pipeline, tmp_path / "out", states)
        assert "\n" not in str(error.value)
        left = {file.name for file in (tmp_path / "out" / "teacher" / "rank-0").glob("*.parquet")}
        assert left <= {*written} and left
        trained(pipeline, tmp_path / "out", states)
    assert not (tmp_path / "out" / "teacher").exists()


def test_a_filler_without_its_trainer_does_not_wait_for_a_server_that_hangs(pipeline, model, tmp_path):
    states, hung, over = server(pipeline, model), threading.Event(), threading.Event()
    complete, asked = states.complete, threading.Event()

    def hanging(body: dict) -> dict | None:
        if not hung.is_set():
            return complete(body)
        asked.set()
        over.wait()
        return None

    def step(trainer, *arguments: object, **more: object) -> None:
        window = trainer.data_collator.index.window
        hung.set()
        window.at(2)  # makes room
        assert asked.wait(60)
        window.process.terminate()
        window.process.join(60)
        waits = window.process.thread.is_alive()
        over.set()
        assert not waits
        raise Stop

    states.complete = hanging
    with serving(states), pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(eagle.EagleTrainer, "training_step", step)
        trained(pipeline, tmp_path / "out", states)


def started(pipeline, output: Path, states: StateServer) -> subprocess.Popen[bytes]:
    """A run of the command, which has a worker that reads ahead, and is in its middle."""
    flags = ["--target", str(pipeline / "target"), "--completions", str(pipeline / "long"), "--any_target", "true"]
    flags += ["--layer_ids", "[1, 2]", "--teacher", f"vllm:{states.url}", "--teacher_window", str(WINDOW)]
    training = {"output_dir": str(output), "max_steps": 1000, "use_cpu": "true", "dataloader_num_workers": 1}
    training |= {"per_device_train_batch_size": 4, "save_strategy": "no", "report_to": "none"}
    flags += [word for name, value in training.items() for word in (f"--training.{name}", str(value))]
    command = [sys.executable, "-m", "draftsmith.medusa.eagle", *flags]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    while not any(output.glob("teacher/rank-0/*.parquet")):
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.01)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_filler_ends_with_its_trainer(pipeline, model, tmp_path, number):
    """Killed alone, or interrupted with it, as a terminal does."""
    folder = tmp_path / "out" / "teacher" / "rank-0"
    with serving(server(pipeline, model, pause=0.02)) as (states,):
        run = started(pipeline, tmp_path / "out", states)
        (os.kill if number == signal.SIGKILL else os.killpg)(run.pid, number)
        with (folder / ALIVE).open() as alive:
            fcntl.flock(alive, fcntl.LOCK_SH)  # the filler is gone
        _, said = run.communicate(timeout=120)  # and so are the worker and what else writes to the pipe
    assert run.returncode == (-number if number == signal.SIGKILL else 130)
    assert b"Traceback" not in said and said.count(b"interrupted") == (number == signal.SIGINT)
    assert list(folder.glob("*.parquet"))


@pytest.mark.slow
def test_a_filler_that_is_killed_ends_the_run(pipeline, model, tmp_path):
    states = server(pipeline, model, pause=0.05)

    def kill() -> None:
        while not (children := multiprocessing.active_children()):
            time.sleep(0.001)
        os.kill(children[0].pid, signal.SIGINT)  # while it imports: interruptions are its trainer's
        while states.answered < 10:
            time.sleep(0.01)
        os.kill(children[0].pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with serving(states), pytest.raises(InputError, match="found that it was killed"):
        trained(pipeline, tmp_path / "out", states)


@pytest.mark.slow
def test_each_process_has_a_window_of_its_own(pipeline, model, tmp_path):
    training = TRAINING | {"max_steps": 5}
    options = {"heldout": [str(pipeline / "heldout")], "target_dtype": "float32", "layer_ids": [1, 2]}
    (one,) = forked(eagled, pipeline, tmp_path / "one", {"run": options | {"training": training}}, strategy="one")
    with serving(server(pipeline, model)) as (states,):
        options |= {"teacher": [f"vllm:{states.url}"], "teacher_window": WINDOW}
        run = {"run": options | {"training": training}}
        ranks = forked(eagled, pipeline, tmp_path / "two", run, strategy="ddp")
    for rank in ranks:
        losses = [[entry["loss"] for entry in each["run"]["log"] if "loss" in entry] for each in (rank, one)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0]
    saved, expected = (load_file(tmp_path / name / "run" / "model.safetensors") for name in ("two", "one"))
    assert furthest(saved, expected) < LAST_BITS
