"""Which step of a run is kept: the best on held-out text where checkpoints are, and a line says which it is."""

import json
import shutil

import pytest
from pipelines import configured, eagle_configured, furthest, heads_configured
from safetensors.torch import load_file

from draftsmith.distill import __main__ as distill
from draftsmith.distill.config import DraftInit
from draftsmith.medusa.eagle import __main__ as eagle
from draftsmith.medusa.heads import __main__ as medusa
from draftsmith.scripts import cli
from draftsmith.train.job.kept_step import KeptStep
from draftsmith.train.options import LoraOptions
from draftsmith.train.trainer import RecipeTrainer

RECIPES = {
    "distill": (distill.distill, configured, {}),
    "lora": (distill.distill, configured, {"draft": None, "init": DraftInit(1, lora=LoraOptions(4))}),
    "medusa": (medusa.train_heads, heads_configured, {}),
    "eagle": (eagle.train_heads, eagle_configured, {}),
}
STEPS = {"max_steps": 5, "load_best_model_at_end": None, "save_strategy": "steps", "save_steps": 5}
HEIGHTS = {1: 1.5, 2: 2.5, 3: 2.0, 4: 1.75, 5: 1.25}
PEAK = "step 2 of 5: mean_acceptance_length 2.500, the best of 5 on held-out text; the last has 1.250"


@pytest.fixture
def peaked(monkeypatch):
    """Acceptance that is made to peak at step 2."""
    real = RecipeTrainer.log

    def log(self, logs, *args, **kwargs):
        if "eval_mean_acceptance_length" in logs:
            logs["eval_mean_acceptance_length"] = HEIGHTS[self.state.global_step]
        real(self, logs, *args, **kwargs)

    monkeypatch.setattr(RecipeTrainer, "log", log)


def run(name, pipeline, output, training, **options):
    train, config, own = RECIPES[name]
    return train(config(pipeline, output, training=STEPS | training, **own | options))


def stored(directory):
    return load_file(directory / "model.safetensors")


@pytest.mark.usefixtures("peaked")
@pytest.mark.parametrize("name", ["lora", "medusa", "eagle"])
def test_the_best_step_is_kept_and_named(name, pipeline, tmp_path, capsys):
    """Between two checkpoints, too; one that was the best for a time is not left behind."""
    short = STEPS | {"max_steps": 2}
    heldout = {"heldout": [str(pipeline / "heldout")]}
    run(name, pipeline, tmp_path / "two", short, save_dtype="float32")
    capsys.readouterr()
    out = tmp_path / "out"
    run(name, pipeline, out, {"eval_strategy": "steps", "eval_steps": 1}, save_dtype="float32", **heldout)
    assert furthest(stored(out), stored(tmp_path / "two")) == 0
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-5"]
    assert f"what was trained is in {out}: {PEAK}" in capsys.readouterr().err
    assert f"| Weights | {PEAK} |" in (out / "README.md").read_text()
    assert str(KeptStep.left_in(out)) == PEAK
    # Started again, it does nothing, and says the same.
    before = (out / "model.safetensors").stat().st_mtime_ns
    run(name, pipeline, out, {"eval_strategy": "steps", "eval_steps": 1}, save_dtype="float32", **heldout)
    assert f"what was trained is in {out}: {PEAK}; " in capsys.readouterr().err
    assert (out / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.usefixtures("peaked")
def test_a_run_that_is_killed_goes_on_to_the_same_step_in_another_place(pipeline, tmp_path):
    """With one checkpoint and the best kept."""
    training = {"save_steps": 1, "save_total_limit": 1}
    heldout = {"heldout": [str(pipeline / "heldout")]}
    whole = run("eagle", pipeline, tmp_path / "whole", training, **heldout)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        taken, real = [], RecipeTrainer.training_step

        def step(*args, **kwargs):
            taken.append(1)
            if len(taken) > 4:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        patch.setattr(RecipeTrainer, "training_step", step)
        run("eagle", pipeline, tmp_path / "cut", training, **heldout)
    assert sorted(path.name for path in (tmp_path / "cut").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    shutil.move(tmp_path / "cut", tmp_path / "moved")
    trainer = run("eagle", pipeline, tmp_path / "moved", training, **heldout)
    assert str(trainer.kept_step) == str(whole.kept_step) == PEAK
    assert furthest(stored(tmp_path / "moved"), stored(tmp_path / "whole")) == 0


@pytest.mark.usefixtures("peaked")
def test_where_the_last_step_is_kept_a_line_says_what_it_was_compared_with(pipeline, tmp_path, capsys):
    heldout, each = {"heldout": [str(pipeline / "heldout")]}, {"eval_strategy": "steps", "eval_steps": 1}
    last = "step 5, the last: mean_acceptance_length 1.250 on held-out text"
    for number, (training, options, said) in enumerate(
        (
            ({}, {}, "step 5, the last; no held-out text compared it with others"),
            ({"save_strategy": "no"}, heldout, f"{last}, and no other step was measured"),
            (each | {"save_strategy": "no"}, heldout, f"{last}; the best that was measured, step 2, had 2.500"),
        )
    ):
        trainer = run("eagle", pipeline, tmp_path / str(number), training, **options)
        assert f"is in {tmp_path / str(number)}: {said}\n" in capsys.readouterr().err
        assert f"| Weights | {said} |" in (tmp_path / str(number) / "README.md").read_text()
        assert trainer.kept_evaluation.get("eval_mean_acceptance_length") == (1.25 if options else None)


@pytest.mark.usefixtures("peaked")
def test_an_export_says_which_step_it_is(pipeline, tmp_path, capsys):
    run("distill", pipeline, tmp_path / "out", {"save_steps": 1}, heldout=[str(pipeline / "heldout")])
    capsys.readouterr()
    flags = ["--drafter", tmp_path / "out", "--target", pipeline / "target", "--format", "vllm"]
    assert cli.main(["export", *map(str, flags)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"# {tmp_path / 'out'} holds {PEAK}"
    record = json.loads((tmp_path / "out" / "draftsmith.json").read_text())
    del record["kept"]
    (tmp_path / "out" / "draftsmith.json").write_text(json.dumps(record))
    assert cli.main(["export", *map(str, flags)]) == 0 and "holds" not in capsys.readouterr().out
