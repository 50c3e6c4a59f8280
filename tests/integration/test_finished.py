"""A run that is started again where it has ended, or cannot go on: nothing is changed, and one line says why."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from pipelines import configured, eagle_configured, furthest, heads_configured, history, weights
from safetensors.torch import load_file

from draftsmith.decode.errors import InputError
from draftsmith.distill import __main__ as distill
from draftsmith.distill.config import DraftInit
from draftsmith.medusa.eagle import __main__ as eagle
from draftsmith.medusa.heads import __main__ as medusa
from draftsmith.train.job.kept_step import KeptStep
from draftsmith.train.trainer import RecipeTrainer

RECIPES = {
    "distill": (distill.distill, configured),
    "medusa": (medusa.train_heads, heads_configured),
    "eagle": (eagle.train_heads, eagle_configured),
}
KEPT = {"save_strategy": "steps", "save_steps": 3}
RUNS = {  # of 5 steps an epoch
    "in the middle of an epoch": KEPT | {"max_steps": 4},
    "behind two epochs": {"save_strategy": "epoch", "num_train_epochs": 2},
    "without checkpoints": {"max_steps": 2},
}


@pytest.fixture
def steps(monkeypatch):
    """The steps that are taken."""
    taken = []
    real = RecipeTrainer.training_step
    monkeypatch.setattr(RecipeTrainer, "training_step", lambda *args, **kw: taken.append(1) or real(*args, **kw))
    return taken


def contents(directory: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.parametrize(("name", "run"), [*(("distill", run) for run in RUNS), ("eagle", next(iter(RUNS)))])
def test_a_finished_run_that_is_started_again_changes_nothing(name, run, pipeline, tmp_path, steps, capsys):
    train, config = RECIPES[name]
    options = {"training": RUNS[run]}
    first = train(config(pipeline, tmp_path / "out", **options))
    before, taken = contents(tmp_path / "out"), len(steps)
    capsys.readouterr()
    again = train(config(pipeline, tmp_path / "out", **options))
    assert len(steps) == taken and contents(tmp_path / "out") == before
    assert history(again, "loss") == history(first, "loss") != []
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("training: ")]
    assert line.startswith(f"training: all {first.state.global_step} steps are done, and what was trained is in ")


def test_a_finished_run_goes_on_to_more_steps_and_not_back_to_fewer(pipeline, tmp_path, steps, capsys):
    def train(name: str, count: int, **options):
        training = KEPT | {"max_steps": count, "save_steps": 2} | options.pop("training", {})
        return distill.distill(configured(pipeline, tmp_path / name, training=training, **options))

    train("out", 4)
    whole = train("whole", 6)
    taken = len(steps)
    assert history(train("out", 6), "loss") == history(whole, "loss")
    assert len(steps) - taken == 2
    assert furthest(weights(tmp_path / "out"), weights(tmp_path / "whole")) == 0
    before = contents(tmp_path / "out")
    capsys.readouterr()
    train("out", 4)
    assert contents(tmp_path / "out") == before and "all 6 steps are done" in capsys.readouterr().err
    with pytest.raises(InputError, match="completions: expected 20 samples as in checkpoint-6, found 10"):
        train("out", 6, completions=[str(pipeline / "long")])
    # Begun anew where nothing is kept but another config's result.
    none = {"training": {"save_strategy": "no"}}
    assert history(train("none", 2, **none), "loss") != history(train("none", 2, temperature=0.5, **none), "loss")


@pytest.mark.parametrize("kind", RECIPES)
def test_no_steps_leave_the_drafter_as_it_begins_and_more_begin_there(kind, pipeline, tmp_path, steps):
    train, config = RECIPES[kind]

    def run(name: str, count: int) -> dict[str, torch.Tensor]:
        train(config(pipeline, tmp_path / name, training=KEPT | {"max_steps": count}))
        return load_file(tmp_path / name / "model.safetensors")

    begun = run("out", 0)
    assert not steps and KeptStep.left_in(tmp_path / "out").step == 0
    assert furthest(run("out", 1), trained := run("anew", 1)) == 0 < furthest(begun, trained)


def test_overfit_ends_once_its_samples_are_accepted_and_fails_if_they_never_are(pipeline, tmp_path, steps):
    training = {"learning_rate": 0.0, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}

    def run(draft: str, **options) -> RecipeTrainer:
        options |= {"draft": str(pipeline / draft), "overfit": 2, "training": training}
        return distill.distill(configured(pipeline, tmp_path / draft, **options))

    trainer = run("target")
    assert len(steps) == 2 and len(trainer.train_dataset) == 2 and trainer.eval_dataset is trainer.train_dataset
    for _ in range(2):  # the second time it is a finished run
        with pytest.raises(InputError, match=r"^overfit: expected each .* 0\.95, found 0\.\d+ after 4 steps"):
            run("draft")
    with pytest.raises(InputError, match=r"^heldout: expected none with overfit"):
        run("draft", heldout=0.5)


def test_a_run_that_ended_early_has_ended(pipeline, tmp_path, steps):
    """By its patience: nothing gets better at a learning rate of nothing."""
    training = {"max_steps": 8, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    training |= {"load_best_model_at_end": True, "learning_rate": 0.0}
    options = {"training": training, "patience": 1, "heldout": [str(pipeline / "heldout")]}
    trainer = distill.distill(configured(pipeline, tmp_path / "out", **options))
    assert 2 < trainer.state.global_step == len(steps) < 8
    before = contents(tmp_path / "out")
    distill.distill(configured(pipeline, tmp_path / "out", **options))
    assert contents(tmp_path / "out") == before


def test_a_run_that_was_killed_behind_its_last_checkpoint_is_finished_without_a_step(
    pipeline, tmp_path, steps, monkeypatch
):
    options = {"training": KEPT | {"max_steps": 3}}
    whole = distill.distill(configured(pipeline, tmp_path / "whole", **options))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RecipeTrainer, "save_state", interrupted)
        distill.distill(configured(pipeline, tmp_path / "cut", **options))
    assert not (tmp_path / "cut" / "draftsmith.json").exists()
    taken = len(steps)
    again = distill.distill(configured(pipeline, tmp_path / "cut", **options))
    assert len(steps) == taken and again.state.global_step == 3
    assert history(again, "loss") == history(whole, "loss")
    assert furthest(weights(tmp_path / "cut"), weights(tmp_path / "whole")) == 0


def interrupted(trainer: RecipeTrainer) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def checkpoint(pipeline, tmp_path_factory):
    """A run that stands at its second step of four."""
    output = tmp_path_factory.mktemp("checkpoint") / "out"
    distill.distill(configured(pipeline, output, training=KEPT | {"max_steps": 2}))
    return output


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def changed(**fields):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | fields))


FAULTS = {
    "no weights": ("model.safetensors", Path.unlink),
    "an optimizer's state that is cut": ("optimizer.pt", cut),
    "a schedule that is cut": ("scheduler.pt", cut),
    "random numbers that are cut": ("rng_state.pth", cut),
    "a state without steps": ("trainer_state.json", changed(global_step=None)),
    "no state": ("trainer_state.json", Path.unlink),
    "a job that is no JSON": ("job.json", cut),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_is_damaged_is_named_in_one_line(fault, pipeline, checkpoint, tmp_path, steps):
    output = Path(shutil.copytree(checkpoint, tmp_path / "out"))
    name, damage = FAULTS[fault]
    damage(output / "checkpoint-2" / name)
    with pytest.raises(InputError, match=r"^\S+checkpoint-2\S*: .*expected .*, found") as error:
        distill.distill(configured(pipeline, output, training=KEPT | {"max_steps": 4}))
    assert "\n" not in str(error.value) and not steps


def test_a_checkpoint_of_another_draft_is_refused(pipeline, checkpoint, tmp_path):
    output = shutil.copytree(checkpoint, tmp_path / "out")
    deeper, narrower = (
        {"draft": str(pipeline / "target")},
        {"draft": None, "init": DraftInit(config={"hidden_size": 16})},
    )
    for draft in (deeper, narrower):
        with pytest.raises(InputError, match=r"^draft: expected config \w+ as in checkpoint-2, found (config|None)"):
            distill.distill(configured(pipeline, output, training=KEPT | {"max_steps": 4}, **draft))


@pytest.mark.parametrize(
    ("kind", "first", "then", "named"),
    [
        ("eagle", {"layer_ids": [1]}, {"layer_ids": [2]}, r"layer_ids: expected \[1\] .*, found \[2\]"),
        ("distill", {"init": DraftInit(draft_vocabulary=40)}, {}, "init.draft_vocabulary: expected 40 .*, found None"),
        ("medusa", {"training": {"learning_rate": 1e-3}}, {}, "training.learning_rate: expected 0.001 .*, found 0.003"),
        ("distill", {}, {"divergence": {"tvd": 1.0}}, "divergence: expected forward_kl .*, found {'tvd': 1.0}"),
    ],
)
def test_a_run_keeps_its_shape_and_its_loss(kind, first, then, named, pipeline, tmp_path, steps):
    train, config = RECIPES[kind]

    def run(count: int, training: dict | None = None, **options) -> None:
        training = KEPT | {"max_steps": count, "save_steps": 1} | (training or {})
        train(config(pipeline, tmp_path / "out", training=training, **options))

    run(1, **first)
    for count in (1, 2):  # over a finished run, and to continue it
        with pytest.raises(InputError, match=f"^{named}; give that, or another training.output_dir"):
            run(count, **then)
    assert len(steps) == 1


def test_what_learning_does_not_depend_on_may_change_and_a_finished_run_names_it(pipeline, tmp_path, steps, capsys):
    draft = shutil.copytree(pipeline / "draft", tmp_path / "moved")
    other = {"draft": str(draft), "save_dtype": "bfloat16", "loss_chunk": 4096}
    for count, options in ((1, {}), (2, other), (2, {})):
        training = KEPT | {"max_steps": count, "save_steps": 1, "logging_steps": count}
        distill.distill(configured(pipeline, tmp_path / "out", training=training, **options))
    assert len(steps) == 2
    assert "run's change nothing: loss_chunk, save_dtype, draft; a larger" in capsys.readouterr().err
