"""`draftsmith learning-curve`: recipes run on shares of the text, once each, and a forecast comes of them."""

import json
import shutil
from dataclasses import replace

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


def replayed(share: float) -> dict:
    """A point as a run on a share would have left it."""
    texts = {"tokens": [9.0, 8.0], "rounds": [6.0 - share, 5.0 - share]}
    return {"share": share, "tokens_learned": int(100 * share), "replayed": {"T=1": texts}}


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
    last = {"training": {"save_strategy": "no"}}
    run = write(**last | options | ({"draft": pipeline / "draft"} if "draft" in options else {}))
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
    if name == "medusa":  # again, with one share more: only that is trained on
        assert command.main([*arguments, "--shares", "[0.3, 0.6, 0.8, 1]"]) == 0
        assert shares(trained[3:]) == [0.8]


def test_a_run_that_chooses_a_checkpoint_by_the_held_out_text_replays_it(pipeline, recipe, tmp_path):
    write, trained = recipe
    run = write(draft=pipeline / "draft", training={"eval_strategy": "steps", "eval_steps": 1})
    with listened() as heard:
        command._point(LearningCurveConfig(run, str(tmp_path)), 0.3, tmp_path / "share")
    heard.require("reading completions", "replay", *LOADING, trains=True)
    (trainer,) = trained
    assert len(evaluations(trainer)) >= 2


def test_an_interrupt_says_how_many_shares_are_kept(pipeline, recipe, tmp_path, monkeypatch, capsys):
    write, _ = recipe
    output = tmp_path / "curve"
    arguments = ["--run", write(draft=pipeline / "draft"), "--output", str(output), "--shares", "0.3,0.6,1"]
    for last, kept in ((0.3, "nothing was kept"), (1.0, f"2 of 3 shares are kept in {output}")):

        def interrupted(config, share, directory, last=last):
            if share == last:
                raise KeyboardInterrupt
            return replayed(share)

        monkeypatch.setattr(command, "_point", interrupted)
        assert run(lambda: command.main(arguments)) == 130
        assert capsys.readouterr().err.splitlines()[-1] == f"interrupted: {kept}; run the same command again"


def test_each_held_out_directory_is_replayed_under_its_own_laws(pipeline, recipe, tmp_path):
    """Greedy text is far likelier than what a target samples: replay refuses it at the temperature of the run.

    A directory of several temperatures is replayed at each, and given answers at the run's.
    """
    write, _ = recipe
    texts, given = str(pipeline / "heldout.txt"), tmp_path / "given"
    for name, options in (
        ("0", {"temperature": 0.0, "top_k": 5}),
        ("0.5", {"temperature": 0.5, "top_k": 5}),
        ("mixed", {"temperatures": [0.0, 0.5]}),
    ):
        prepare(PrepareConfig(str(pipeline / "target"), texts, str(tmp_path / name), max_new_tokens=8, **options))
    shutil.copytree(pipeline / "heldout", given)
    manifest = json.loads((given / "manifest.json").read_text())
    kept = ("split", "limit", "shard_size", "system_prompt", "chat_template_kwargs")  # what given answers note
    manifest["settings"] = {name: manifest["settings"][name] for name in kept}
    (given / "manifest.json").write_text(json.dumps(manifest))
    run = write(draft=pipeline / "draft", heldout=[tmp_path / name for name in ("0", "0.5", "mixed", "given")])
    found = command.measure_curve(LearningCurveConfig(run, str(tmp_path / "curve"), shares=[0.3, 0.6, 1.0]))
    curves, point = found["curves"], found["points"][0]["replayed"]
    assert curves["T=0"]["lengths"] != curves["T=1"]["lengths"]
    assert list(curves) == ["T=0", "T=0.5, top-k 5", "T=0.5", "T=1"]
    assert [len(sums["tokens"]) for sums in point.values()] == [10, 5, 5, 5]


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
    config = LearningCurveConfig(write(draft=pipeline / "draft"), output, shares=[0.3, 0.6, 1.0])
    monkeypatch.setattr(command, "_trained", lambda *_: 2)
    with pytest.raises(InputError, match=r"run: expected a training run on a share of 0\.4 that ends well, found exit"):
        command.measure_curve(replace(config, shares=[0.4, 0.6, 1.0]))
    monkeypatch.setattr(command, "_point", lambda config, share, directory: replayed(share))
    command.measure_curve(config)
    with pytest.raises(InputError, match=r"output: expected .*learning_curve\.json of the same draft_length"):
        command.measure_curve(replace(config, draft_length=2))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(bytes(range(256))), "expected JSON, found"),
        (lambda path: path.mkdir(), "output: expected a file or nothing at"),
        (lambda path: path.with_suffix(".svg").mkdir(), "output: expected a file or nothing at"),
    ],
    ids=["binary", "a directory", "the chart a directory"],
)
def test_an_output_that_cannot_be_is_refused_before_anything_is_trained(recipe, tmp_path, spoil, message):
    write, trained = recipe
    (tmp_path / "curve").mkdir()
    spoil(tmp_path / "curve" / "learning_curve.json")
    with pytest.raises(InputError, match=message) as error:
        command.measure_curve(LearningCurveConfig(write(), str(tmp_path / "curve"), shares=[0.3, 0.6, 1.0]))
    assert "\n" not in str(error.value) and not trained


def test_a_run_that_is_no_text_is_refused_in_one_line(tmp_path):
    (tmp_path / "run.yaml").write_bytes(bytes(range(256)))
    with pytest.raises(InputError) as error:
        command.measure_curve(LearningCurveConfig(str(tmp_path / "run.yaml"), str(tmp_path / "curve")))
    assert "\n" not in str(error.value)
