"""`draftsmith learning-curve`: recipes run on shares of the text, once each, and a forecast comes of them."""

import json
import shutil

import pytest
import yaml
from listening import LOADING, listened

from draftsmith.decode.errors import InputError
from draftsmith.distill.__main__ import distill
from draftsmith.distill.config import DistillConfig
from draftsmith.medusa import __main__ as medusa
from draftsmith.medusa.eagle import __main__ as eagle
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.heads.config import MedusaTrainingConfig
from draftsmith.scripts import learning_curve as command
from draftsmith.scripts.configs import LearningCurveConfig
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.generate import PrepareConfig, prepare

RECIPES = {
    "distill": (DistillConfig, distill),
    "medusa": (MedusaTrainingConfig, medusa.train_heads),
    "eagle": (EagleTrainingConfig, eagle.train_heads),
}


@pytest.fixture
def recipe(pipeline, tmp_path, monkeypatch):
    """Write a run's config and train in this process; return what writes it, and the trainers."""
    trained = []

    def train(name, arguments):
        cls, recipe = RECIPES[name]
        config = parse_config(cls, arguments)
        trained.append(recipe(config))
        return 0

    monkeypatch.setattr(command, "_trained", train)

    def write(**options):
        training = {"max_steps": 2, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True}
        training |= options.pop("training", {})
        fields = {"target": pipeline / "target", "completions": [pipeline / "short", pipeline / "long"]}
        fields |= {"heldout": [pipeline / "heldout"], **options}
        values = {k: list(map(str, v)) if isinstance(v, list) else v for k, v in fields.items()}
        values = {k: str(v) if not isinstance(v, (list, dict, int)) else v for k, v in values.items()}
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(values | {"training": training}))
        return str(path)

    return write, trained


def shares(trained) -> list[float]:
    return [trainer.recipe.share for trainer in trained]


def evaluations(trainer) -> list[float]:
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


@pytest.mark.parametrize(
    ("name", "options", "most"),
    [
        ("distill", {"draft": "draft"}, 5),
        ("distill", {"draft": "draft", "parallel": 3}, 4),
        ("medusa", {"num_heads": 2}, 3),
        ("eagle", {"num_steps": 2, "layer_ids": [1], "draft_vocabulary": 40}, 5),
    ],
    ids=["distill", "parallel", "medusa", "eagle"],
)
def test_shares_are_trained_on_once_and_a_forecast_comes_of_them(
    pipeline, recipe, tmp_path, name, options, most, capsys
):
    write, trained = recipe
    run = write(**options | ({"draft": pipeline / "draft"} if "draft" in options else {}))
    arguments = ["--run", run, "--recipe", name, "--output", str(tmp_path / "curve")]
    assert command.main([*arguments, "--shares", "0.3,0.6,1", "--times", "2"]) == 0
    few, some, all_of_them = (len(trainer.data) for trainer in trained)
    assert shares(trained) == [0.3, 0.6, 1.0] and 0 < few < some < all_of_them == 20
    assert not any(map(evaluations, trained))  # the curve replays what they left
    found = json.loads((tmp_path / "curve" / "learning_curve.json").read_text())
    assert found["schema"] == "draftsmith.learning_curve/3"
    (law,) = found["curves"]
    assert [len(point["replayed"][law]["rounds"]) for point in found["points"]] == [5, 5, 5]
    assert found["curves"][law]["sizes"] == [point["tokens_learned"] for point in found["points"]]
    assert all(1 <= length["value"] <= most for length in found["curves"][law]["lengths"])
    assert (tmp_path / "curve" / "learning_curve.svg").read_text().startswith("<?xml")
    assert found["curves"][law]["says"][0] in " ".join(capsys.readouterr().out.split())
    # Again, with one share more: only that is trained on.
    assert command.main([*arguments, "--shares", "[0.3, 0.6, 0.8, 1]"]) == 0
    assert shares(trained[3:]) == [0.8]


def test_a_run_that_chooses_a_checkpoint_by_the_held_out_text_replays_it(pipeline, recipe, tmp_path):
    write, trained = recipe
    run = write(draft=pipeline / "draft", training={"eval_strategy": "steps", "eval_steps": 1})
    with listened() as heard:
        command.measure_curve(LearningCurveConfig(run, str(tmp_path / "curve"), shares=[0.3, 0.6, 1.0]))
    heard.require("reading completions", "replay", *LOADING, trains=True)
    assert all(len(evaluations(trainer)) >= 2 for trainer in trained)


def test_an_interrupt_says_how_many_shares_are_kept(pipeline, recipe, tmp_path, monkeypatch, capsys):
    write, trained = recipe
    train, output = command._trained, tmp_path / "curve"
    arguments = ["--run", write(draft=pipeline / "draft"), "--output", str(output), "--shares", "0.3,0.6,1"]
    for finished, kept in ((0, "nothing was kept"), (2, f"2 of 3 shares are kept in {output}")):

        def interrupted(*args, finished=finished):
            if len(trained) == finished:
                raise KeyboardInterrupt
            return train(*args)

        monkeypatch.setattr(command, "_trained", interrupted)
        assert run(lambda: command.main(arguments)) == 130
        assert capsys.readouterr().err.splitlines()[-1] == f"interrupted: {kept}; run the same command again"


def test_each_held_out_directory_is_replayed_under_its_own_law(pipeline, recipe, tmp_path):
    """Greedy text is far likelier than what a target samples: replay refuses it at the temperature of the run."""
    write, _ = recipe
    for temperature, top_k in ((0, 5), (1, 0), (0.5, 5)):
        options = {"temperature": temperature, "top_k": top_k, "max_new_tokens": 8}
        prepare(
            PrepareConfig(
                str(pipeline / "target"), str(pipeline / "heldout.txt"), str(tmp_path / f"{temperature}"), **options
            )
        )
    run = write(draft=pipeline / "draft", heldout=[tmp_path / name for name in ("0", "1", "0.5")])
    config = LearningCurveConfig(run, str(tmp_path / "curve"), shares=[0.3, 0.6, 1.0])
    curves = command.measure_curve(config)["curves"]
    assert list(curves) == ["T=0", "T=1", "T=0.5, top-k 5"]
    assert curves["T=0"]["lengths"] != curves["T=1"]["lengths"]


def test_a_directory_of_several_temperatures_is_replayed_at_each_and_given_answers_at_the_runs(
    pipeline, recipe, tmp_path
):
    write, _ = recipe
    texts, given = str(pipeline / "heldout.txt"), tmp_path / "given"
    options = {"temperatures": [0.0, 0.5], "max_new_tokens": 8}
    prepare(PrepareConfig(str(pipeline / "target"), texts, str(tmp_path / "mixed"), **options))
    shutil.copytree(pipeline / "heldout", given)
    manifest = json.loads((given / "manifest.json").read_text())
    kept = ("split", "limit", "shard_size", "system_prompt", "chat_template_kwargs")  # what given answers note
    manifest["settings"] = {name: manifest["settings"][name] for name in kept}
    (given / "manifest.json").write_text(json.dumps(manifest))
    run = write(draft=pipeline / "draft", heldout=[tmp_path / "mixed", given], share=1)
    found = command.measure_curve(LearningCurveConfig(run, str(tmp_path / "curve"), shares=[0.3, 0.6, 1.0]))
    replayed = found["points"][0]["replayed"]
    assert {law: len(sums["tokens"]) for law, sums in replayed.items()} == {"T=0": 5, "T=0.5": 5, "T=1": 5}


def test_what_cannot_be_measured_is_refused(pipeline, recipe, tmp_path, monkeypatch):
    write, _ = recipe
    run = write(draft=pipeline / "draft")
    output = str(tmp_path / "curve")
    with pytest.raises(InputError, match="shares: expected at least 3 amounts for a curve, found 2"):
        LearningCurveConfig(run, output, shares=[0.5, 1.0])
    with pytest.raises(InputError, match="shares: expected more than 0 and at most 1, found 2"):
        LearningCurveConfig(run, output, shares=[0.5, 1.0, 2.0])
    with pytest.raises(InputError, match=r"run: expected heldout directories in .*, found none"):
        command.measure_curve(LearningCurveConfig(write(draft=pipeline / "draft", heldout=[]), output))
    with pytest.raises(InputError, match=r"run: expected a target that stays as it is, .* that is trained"):
        command.measure_curve(LearningCurveConfig(write(backbone="lora"), output, "medusa"))
    run = write(draft=pipeline / "draft")
    command.measure_curve(LearningCurveConfig(run, output, shares=[0.3, 0.6, 1.0]))
    with pytest.raises(InputError, match=r"output: expected .*learning_curve\.json of the same draft_length"):
        command.measure_curve(LearningCurveConfig(run, output, draft_length=2))
    monkeypatch.setattr(command, "_trained", lambda *_: 2)
    with pytest.raises(InputError, match=r"run: expected a training run on a share of 0\.4 that ends well, found exit"):
        command.measure_curve(LearningCurveConfig(run, output, shares=[0.4, 0.6, 1.0]))
