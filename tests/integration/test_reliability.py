"""A run that is killed, starved or fed nonsense: nothing is lost, and nothing goes on in silence."""

import json
import os
import resource
import shutil
import signal
from itertools import pairwise
from pathlib import Path

import pytest
from pipelines import configured, furthest, heads_configured, weights
from processes import exit_code as forked
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback
from waits import Waits

from draftsmith.decode.errors import InputError
from draftsmith.distill import __main__ as command
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.medusa.heads import __main__ as heads_command
from draftsmith.train import checkpoint
from draftsmith.train.data.examples import CompletionCollator
from draftsmith.train.data.generate import load_completions
from draftsmith.train.job.checkpointed import CheckpointedTrainer
from draftsmith.train.runs import last_checkpoint
from draftsmith.train.trainer import RecipeTrainer

STEPS = 8  # of 4 samples out of 10: the third epoch begins at step 7


def options(pipeline: Path) -> dict:
    """Everything that draws numbers: dropout, the draft's own text, a shuffled order, epochs; with evaluations."""
    training = {
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 2,
        "logging_steps": 1,
    }
    training |= {"eval_strategy": "steps", "eval_steps": 3, "lr_scheduler_type": "cosine"}
    return {
        "draft": str(pipeline / "dropping"),
        "completions": [str(pipeline / "long")],
        "heldout": [str(pipeline / "heldout")],
        "on_policy": 0.5,
        "on_policy_tokens": 6,
        "optimizer": "muon",
        "training": training,
    }


def losses(directory: Path) -> dict[int, tuple]:
    state = json.loads((directory / "trainer_state.json").read_text())
    kinds = ("loss", "grad_norm", "eval_loss", "eval_alpha")
    return {
        (entry["step"], kind): entry[kind] for entry in state["log_history"] for kind in kinds if kind in entry
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole(pipeline, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "draft"
    assert forked(lambda: command.distill(configured(pipeline, output, **options(pipeline)))) == 0
    return output


@pytest.mark.parametrize("written", ["_save_rng_state", "_save_checkpoint"], ids=lambda name: name[1:])
def test_a_run_killed_while_it_saves_goes_on_from_the_checkpoint_before(pipeline, whole, tmp_path, written):
    """Killed right after a part of the second checkpoint was written; the last part is all of it."""
    output = tmp_path / "draft"

    def killed() -> None:
        real = getattr(DistillTrainer, written)

        def save(self, *args, **kwargs):
            real(self, *args, **kwargs)
            if self.state.global_step == 4:
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(DistillTrainer, written, save)
        command.distill(configured(pipeline, output, **options(pipeline)))

    assert forked(killed) == -signal.SIGKILL
    assert Path(last_checkpoint(str(output))).name == f"checkpoint-{4 if written == '_save_checkpoint' else 2}"
    assert forked(lambda: command.distill(configured(pipeline, output, **options(pipeline)))) == 0
    assert losses(output) == losses(whole)  # to the bit
    assert furthest(weights(output), weights(whole)) == 0.0
    assert not (output / ".checkpoint.partial").exists() and not (output / ".files.partial").exists()


def test_a_disk_that_fills_while_saving_leaves_the_checkpoint_before_whole(pipeline, whole, tmp_path):
    """A limit on the size of a file stands in for the disk: the optimizer does not fit."""
    output, said = tmp_path / "draft", tmp_path / "said"

    def starved() -> None:
        real = DistillTrainer._save_checkpoint

        def save(self, *args, **kwargs):
            if self.state.global_step == 4:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
            try:
                real(self, *args, **kwargs)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

        DistillTrainer._save_checkpoint = save
        try:
            command.distill(configured(pipeline, output, **options(pipeline)))
        except InputError as error:
            said.write_text(str(error))

    assert forked(starved) == 0
    message = said.read_text()
    assert "no space left" in message and "checkpoint-2" in message and "\n" not in message
    assert Path(last_checkpoint(str(output))).name == "checkpoint-2"
    assert forked(lambda: command.distill(configured(pipeline, output, **options(pipeline)))) == 0
    assert losses(output) == losses(whole)


def test_the_library_has_every_private_method_that_is_overridden():
    """Where it renamed one, ours would never be called, and checkpoints would no longer be whole."""
    private = ("_get_train_sampler", "_save", "_save_checkpoint", "_get_output_dir", "_get_grad_norm")
    loads = ("_load_from_checkpoint", "_load_best_model", "_load_optimizer_and_scheduler", "_load_rng_state")
    loads += ("_issue_warnings_after_load",)
    for kind, names in ((RecipeTrainer, private), (CheckpointedTrainer, loads)):
        ours = {name for base in kind.__mro__ if base not in Trainer.__mro__ for name in vars(base)}
        assert all(name in ours and name in vars(Trainer) for name in names)


def spoiled(pipeline: Path, directory: Path, token: int) -> str:
    """The target with a token whose embedding is not a number."""
    shutil.copytree(pipeline / "target", directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def test_a_loss_that_is_not_finite_stops_with_the_samples(pipeline, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "check_finite", lambda *model: None)  # as if it broke on the way
    texts = load_completions(str(pipeline / "long"))
    holders: dict[int, set[str]] = {}
    for name, ids in zip(texts["id"], texts["input_ids"], strict=True):
        for token in ids:
            holders.setdefault(token, set()).add(name)
    token, holding = min(holders.items(), key=lambda item: abs(len(item[1]) - 3))
    config = configured(
        pipeline,
        tmp_path / "out",
        target=spoiled(pipeline, tmp_path / "spoiled", token),
        completions=[str(pipeline / "long")],
        training={"per_device_train_batch_size": 1, "max_steps": 10},
    )
    with pytest.raises(InputError, match="loss: expected a finite number, found nan in step") as error:
        command.distill(config)
    (named,) = str(error.value).partition("on the samples ")[2].partition(";")[0].split(", ")
    assert named in holding


def test_a_gradient_that_is_not_finite_stops_with_the_samples_before_it_is_learned(pipeline, tmp_path, monkeypatch):
    real, trainers = DistillTrainer.training_step, []

    def step(self, model, *args):
        loss = real(self, model, *args)
        trainers.append(self)
        if self.state.global_step == 1:
            next(model.parameters()).grad[0, 0] = float("inf")
        return loss

    monkeypatch.setattr(DistillTrainer, "training_step", step)
    config = configured(pipeline, tmp_path / "out", training={"max_steps": 5, "gradient_accumulation_steps": 2})
    with pytest.raises(InputError, match="gradient norm: expected a finite number") as error:
        command.distill(config)
    assert len(str(error.value).partition("on the samples ")[2].partition(";")[0].split(", ")) == 8
    assert all(p.isfinite().all() for p in trainers[-1].model.parameters())


def test_selection_on_the_loss_is_refused(pipeline, tmp_path):
    training = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    training |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    with pytest.raises(InputError, match="metric_for_best_model: expected one of mean_acceptance_length"):
        configured(pipeline, tmp_path / "out", heldout=[str(pipeline / "heldout")], training=training)
    with pytest.raises(InputError, match=r"patience: expected at least 1, and training\.load_best_model_at_end"):
        configured(pipeline, tmp_path / "out", patience=2)


@pytest.mark.parametrize(("train", "parts"), [("distill", 4), ("medusa", 1)])
def test_the_host_waits_for_the_device_once_a_step(pipeline, tmp_path, monkeypatch, train, parts):
    """However many parts a step has. To collate is the host's own work, and so is what AdamW does on a CPU alone."""
    waits, collate, begin = Waits(), CompletionCollator.__call__, RecipeTrainer.__init__
    counts: list[int] = []

    class Counting(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            counts.append(len(waits.seen))

        def on_pre_optimizer_step(self, *args, **kwargs):
            waits.paused = True

        def on_optimizer_step(self, *args, **kwargs):
            waits.paused = False

    def collated(*args):
        waits.paused = True
        batch = collate(*args)
        waits.paused = False
        return batch

    def begun(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.add_callback(Counting())

    monkeypatch.setattr(CompletionCollator, "__call__", collated)
    monkeypatch.setattr(RecipeTrainer, "__init__", begun)
    training = {"max_steps": 4, "per_device_train_batch_size": 1, "gradient_accumulation_steps": parts}
    training |= {"logging_strategy": "no"}
    with waits.counted():
        if train == "distill":
            command.distill(configured(pipeline, tmp_path / "out", training=training))
        else:
            heads_command.train_heads(heads_configured(pipeline, tmp_path / "out", training=training))
    assert [after - before for before, after in pairwise(counts)] == [1, 1, 1], waits.seen
