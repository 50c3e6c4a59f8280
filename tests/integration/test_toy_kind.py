"""A kind of drafter that is a folder and a line: every command takes it, and nothing else changes."""

import json
from pathlib import Path

import pytest
from short_timing import shorten
from toy_kind.kind import Toy

from draftsmith.scripts import kinds
from draftsmith.scripts.cli import main
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache


def trained(pipeline: Path, output: Path, *more: str) -> Path:
    assert main([
        "toy", "--target", str(pipeline / "target"), "--completions", json.dumps([str(pipeline / "long")]),
        "--heldout", json.dumps([str(pipeline / "heldout")]), "--training.output_dir", str(output),
        "--training.max_steps", "6", "--training.eval_strategy", "steps", "--training.eval_steps", "3",
        "--training.save_steps", "3", "--training.per_device_train_batch_size", "8", "--training.report_to", "none",
        *more,
    ]) == 0  # fmt: skip
    return output


@pytest.fixture(scope="module")
def toy(pipeline, tmp_path_factory):
    """A table that was trained by the command, and the target's flags."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "KINDS", [Toy(), *kinds.KINDS])
        yield trained(pipeline, tmp_path_factory.mktemp("toy") / "table")


def taus_of(directory: Path) -> list[float]:
    state = json.loads((directory / "trainer_state.json").read_text())
    return [entry["eval_mean_acceptance_length"] for entry in state["log_history"] if "eval_loss" in entry]


def test_it_is_trained_and_its_acceptance_replayed(toy):
    taus = taus_of(toy)
    assert len(taus) == 2 and all(tau > 1 for tau in taus)
    assert kinds.kind_of(str(toy)).name == "toy"


def test_it_learns_from_a_cache(toy, pipeline, tmp_path):
    texts = [str(pipeline / name) for name in ("long", "heldout")]
    layout = {"features": True, "layer_ids": [], "feature_dtype": "float32", "dtype": "float32"}
    make_cache(CacheConfig(str(pipeline / "target"), texts, str(tmp_path / "states"), **layout))
    cached = trained(pipeline, tmp_path / "table", "--teacher_cache", json.dumps([str(tmp_path / "states")]))
    assert taus_of(cached) == pytest.approx(taus_of(toy), rel=1e-5)


def test_it_is_measured_replayed_and_certified(toy, pipeline, tmp_path, monkeypatch):
    shorten(monkeypatch)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(x):\nimport os\nclass A:\n")
    code = main([
        "measure", "--target", str(pipeline / "target"), "--drafter", str(toy), "--prompts", str(prompts),
        "--draft-length", "3", "--temperature", "0,1", "--max-new-tokens", "8", "--dtype", "float32", "--threads", "1",
        "--compiled", "false", "--config", '{"lossless_tokens": 2000}', "--output", str(tmp_path / "report"),
    ])  # fmt: skip
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert code == 0 and not report["failures"]
    greedy, drawn = report["runs"]
    assert greedy["proposer"]["kind"] == "toy" and greedy["proposer"]["path"] == str(toy)
    assert greedy["lossless"]["identical"] and greedy["replay"]["agrees"] and drawn["lossless"]["passed"]


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--prompt", "def f(x):", "--max-new-tokens", "6", "--compare", "true"],
        ["profile", "--prompts", "PROMPTS", "--max-new-tokens", "4", "--output", "OUT"],
        ["tune", "--prompts", "PROMPTS", "--max-new-tokens", "4",
         "--levels", '{"threshold": [0.5]}', "--output", "OUT"],
        ["doctor", "--batch-size", "1"],
        ["export", "--format", "own", "--output", "OUT"],
    ],
)  # fmt: skip
def test_every_command_takes_it(toy, pipeline, tmp_path, command, capsys):
    (tmp_path / "prompts.txt").write_text("def f(x):\nimport os\n")
    places = {"PROMPTS": str(tmp_path / "prompts.txt"), "OUT": str(tmp_path / "out")}
    name, *flags = (places.get(word, word) for word in command)
    dtype = [] if name == "export" else ["--dtype", "float32"]
    assert main([name, "--target", str(pipeline / "target"), "--drafter", str(toy), *dtype, *flags]) == 0
    if name == "generate":
        assert "the texts are identical" in capsys.readouterr().err
    if name == "export":
        assert (tmp_path / "out/config.json").read_bytes() == (toy / "config.json").read_bytes()


def test_its_run_is_planned(toy, pipeline, capsys):
    target, completions = str(pipeline / "target"), json.dumps([str(pipeline / "long")])
    flags = ["toy", "--target", target, "--completions", completions, "--max_length", "64"]
    assert main(["plan", *flags, "--gpus", "2"]) == 0
    assert "fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "refusal"),
    [
        (["tree", "--completions", '["texts"]'], "expected one whose tree can be searched for"),
        (["export", "--format", "own", "--output", "OUT", "--verify", "vllm"], "verify: expected none with toy table"),
        (["serve-draft"], "expected a draft model, which drafts without the target, found toy table"),
    ],
)
def test_what_it_cannot_do_is_said_in_one_line(toy, pipeline, tmp_path, command, refusal, capsys):
    target = [] if command[0] == "serve-draft" else ["--target", str(pipeline / "target")]
    flags = [str(tmp_path / "out") if word == "OUT" else word for word in command[1:]]
    assert main([command[0], *target, "--drafter", str(toy), *flags]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and refusal in error
