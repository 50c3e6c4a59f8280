"""A run of `measure` that is killed or fails: what it decoded is kept, and the next run ends with the same report."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from conftest import perturbed, tiny_llama
from drafter_fields import with_drafters
from processes import exit_code

from draftsmith.decode import InputError
from draftsmith.decode.measurement import authorship, intervals
from draftsmith.decode.measurement.certificate import Certificate
from draftsmith.scripts.measure import certify, command, side_by_side, stages
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.scripts.measure.unfinished import DIRECTORY, Unfinished
from draftsmith.scripts.report.types import Failure
from draftsmith.train import cli
from draftsmith.train.runs import save_model

PROMPTS = ["def f(x):", "import os", "a story of x", "self", "for i in", "return a", "x = 1", "class A:", "1 +", "if x"]
PROMPTS += ["while True:", "print("]
NEW = 5
UNITS = 25
"""Units of a run: at each temperature five batches in two turns and one of further prompts, and three certificates."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """A clock that counts rounds, few resamples, and no page; nothing else is made up."""
    monkeypatch.setattr(intervals, "RESAMPLES", 100)
    monkeypatch.setattr(side_by_side, "timed_warm", clock(1.0))
    monkeypatch.setattr(command, "render_page", lambda report: "")
    monkeypatch.setattr(certify, "certify_sampled", lambda *args, **options: Certificate(p_value=0.5, passed=True))


def clock(seconds: float):
    def timed(call):
        output = call()
        return seconds * output.counts.num_drafts, output

    return timed


@pytest.fixture(scope="module")
def root(tmp_path_factory, tokenizer):
    root = tmp_path_factory.mktemp("unfinished")
    target = tiny_llama(0, len(tokenizer), layers=1)
    for name, model in {"target": target, "draft": perturbed(target, 0.05), "stock": perturbed(target, 0.3)}.items():
        model.generation_config.eos_token_id = None
        save_model(model, tokenizer, root / name)
    write_prompts(root / "prompts.jsonl", PROMPTS)
    return root


def write_prompts(path: Path, prompts: list[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))


def config_of(root: Path, output: Path, **fields) -> MeasureConfig:
    own = {name: str(root / path) for name, path in (("target", "target"), ("draft", "draft"))}
    own |= {"baseline_draft": str(root / "stock"), "prompts": str(root / "prompts.jsonl"), "output": str(output)}
    own |= {"prompt_lookup": True, "temperature": "0,1", "batch_size": "2", "draft_length": "3", "dtype": "float32"}
    own |= {"limit": 10, "replay_limit": 12, "max_new_tokens": NEW, "costs": "none", "lossless_tokens": 2000}
    own |= {"compiled": False, "threads": 1}
    return MeasureConfig(**with_drafters(own | fields))


def measured(root: Path, output: Path, **fields) -> dict:
    command.measure(config_of(root, output, **fields))
    return json.loads((output / "report.json").read_text())


@pytest.fixture(scope="module")
def whole(root):
    """The report of a run that nothing disturbs."""
    with pytest.MonkeyPatch.context() as patch:
        _quick.__wrapped__(patch)
        return measured(root, root / "whole")


def killed_after(patch, units: int) -> None:
    """Let the process be killed once so many units are finished; with half a unit, while it writes the next one."""
    keep, done = Unfinished.keep, []

    def counted(self, *key, value):
        if len(done) == units:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(os, "replace", lambda *args: os.kill(os.getpid(), signal.SIGKILL))
                keep(self, *key, value=value)
        keep(self, *key, value=value)
        done.append(key)

    patch.setattr(Unfinished, "keep", counted)


def kill(root: Path, output: Path, units: int, **fields) -> None:
    def work() -> None:
        with pytest.MonkeyPatch.context() as patch:
            killed_after(patch, units)
            measured(root, output, **fields)

    assert exit_code(work) == -signal.SIGKILL
    assert not (output / "report.json").exists()


@pytest.fixture
def finished(monkeypatch):
    """The keys of the units that are finished in this process."""
    keep, keys = Unfinished.keep, []

    def counted(self, *key, value):
        keep(self, *key, value=value)
        keys.append(key)

    monkeypatch.setattr(Unfinished, "keep", counted)
    return keys


def test_a_run_that_is_killed_or_finds_a_full_disk_goes_on_and_reports_the_same(root, whole, tmp_path, finished):
    output, keep = tmp_path / "out", Unfinished.keep

    def full(self, *key, value):
        if len(finished) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        keep(self, *key, value=value)

    kill(root, output, 7)
    unit = next(path for path in (output / DIRECTORY).iterdir() if path.name.startswith("decoded"))
    unit.write_text(unit.read_text()[:-9])  # what is damaged is done again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unfinished, "keep", full)
        with pytest.raises(InputError, match=r"output: no space left .* are kept; free some space and run the same"):
            measured(root, output)
    assert measured(root, output) == whole
    assert len(finished) == UNITS - 7 + 1  # what was finished is not done again
    assert not list(output.glob(".*"))


def test_no_speed_up_is_of_two_processes(root, tmp_path, monkeypatch):
    """The second process is a thousand times slower: a draft of one over plain decoding of the other would show."""
    output = tmp_path / "out"
    kill(root, output, 2, temperature="0", lossless_tokens=0)
    monkeypatch.setattr(side_by_side, "timed_warm", clock(1000.0))
    report = measured(root, output, temperature="0", lossless_tokens=0)
    for run in report["runs"]:
        # A round costs what a token does, so that each batch is as much faster as its τ.
        assert 1 <= run["speedup"]["value"] <= 4
        if run["gain_over_baseline_draft"] is not None:
            assert 0.25 <= run["gain_over_baseline_draft"]["speedup"]["value"] <= 4


def failing(patch, error: Exception, name: str, calls: int) -> None:
    """Let a drafter fail under sampling once it has decoded so many batches."""
    decode, seen = side_by_side.speculative_generate, []

    def speculative(target, proposer, *args, **options):
        if options["do_sample"] and proposer is chosen[0]:
            seen.append(1)
            if len(seen) > calls:
                raise error
        return decode(target, proposer, *args, **options)

    chosen, load = [], command.load_decoding

    def loaded(*args, **options):
        pair, compiled = load(*args, **options)
        chosen.append(pair.proposers[name])
        return pair, compiled

    patch.setattr(command, "load_decoding", loaded)
    patch.setattr(side_by_side, "speculative_generate", speculative)


def test_a_drafter_that_fails_leaves_the_others_reported(root, whole, tmp_path, capsys):
    output = tmp_path / "out"
    config = config_of(root, output, min_speedup=0.01)
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, RuntimeError("a bug\nat 7"), "draft", calls=2)  # to warm up, and the first batch
        patch.setattr(command, "parse_config", lambda *args, **options: config)
        assert cli.run(command.main) == 1
    report = json.loads((output / "report.json").read_text())
    what, message = "draft, γ = 3, at T = 1, batch size 2", "a bug"
    assert report["failures"] == [{"what": what, "error": message, "exit_code": 1}]
    missing = [run for run in whole["runs"] if run not in report["runs"]]
    assert [(run["proposer"]["name"], run["temperature"]) for run in missing] == [("draft", 1.0)]
    assert report["recommendation"]["go"] is report["gate"]["passed"] is False
    assert (
        f"the report is partial, 1 of its parts failed, first {what}: {message}." in report["recommendation"]["reason"]
    )
    assert "the report is partial" in " ".join(capsys.readouterr().out.split())
    again = measured(root, output, min_speedup=0.01)
    assert again["runs"] == whole["runs"] and again["failures"] == [] and again["gate"]["passed"] is True
    assert not (output / DIRECTORY).exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [(RuntimeError("a bug"), 1), (RuntimeError("CUDA out of memory"), 2), (InputError("draft: no"), 2)],
)
def test_input_and_memory_are_told_from_bugs(root, tmp_path, error, code):
    work = Unfinished(config_of(root, tmp_path / "out"))
    with work.attempt("drafting"):
        raise error
    assert work.failures == [Failure("drafting", str(error), code)] and work.errors == [error]


def test_texts_that_replay_refuses_are_reported_without_it(root, whole, tmp_path, monkeypatch, finished):
    output = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(authorship, "FOREIGN", 0.0)  # no sampled text is as likely as that
        patch.setattr(command, "parse_config", lambda *args, **options: config_of(root, output))
        assert cli.run(command.main) == 2
    report = json.loads((output / "report.json").read_text())
    (failure,) = report["failures"]
    assert failure["what"] == "replay at T = 1" and failure["exit_code"] == 2
    assert "expected text that the target wrote under these settings" in failure["error"]
    assert {curve["temperature"] for curve in report["curves"]} == {0.0}
    for run, expected in zip(report["runs"], whole["runs"], strict=True):
        assert run["counts"] == expected["counts"] and (run["replay"] is None) == (run["temperature"] == 1.0)
    finished.clear()
    assert measured(root, output) == whole and finished == []  # all was decoded before


def test_plain_decoding_that_fails_ends_the_setting_alone(root, tmp_path, monkeypatch):
    decode = side_by_side.autoregressive_generate

    def plain(*args, **options):
        if options["do_sample"]:
            raise InputError("target: expected finite logits, found NaN")
        return decode(*args, **options)

    monkeypatch.setattr(side_by_side, "autoregressive_generate", plain)
    report = measured(root, tmp_path / "some")
    assert {run["temperature"] for run in report["runs"]} == {0.0} and len(report["failures"]) == 1
    with pytest.raises(InputError, match="target: expected finite logits, found NaN"):  # nothing is left to report
        measured(root, tmp_path / "none", temperature="1")
    assert not (tmp_path / "none" / "report.json").exists()


@pytest.fixture(scope="module")
def begun(root):
    output = root / "begun"
    with pytest.MonkeyPatch.context() as patch:
        _quick.__wrapped__(patch)
        kill(root, output, 1)
    return output


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"max_new_tokens": 4},
            "max_new_tokens: expected 5, found 4; .*was begun with other settings: give another --output, or remove it",
        ),
        ({"dtype": "bfloat16"}, "dtype: expected 'float32', found 'bfloat16'"),
        ({"baseline_draft": None}, "drafters: expected .*'stock': 'baseline_draft'.*, found "),
        ({"draft": "stock"}, "draft: expected .*draft as it was .*, found .*stock"),
        (
            {"prompts": "others.jsonl"},
            r"prompts: expected .*prompts.jsonl as it was \(sha256: .*, found .*others.jsonl",
        ),
    ],
)
def test_other_settings_are_refused_by_name(root, begun, tmp_path, fields, said):
    output = tmp_path / "out"
    shutil.copytree(begun, output)
    write_prompts(root / "others.jsonl", [*PROMPTS[:-1], "another"])
    fields = {name: str(root / v) if v in ("stock", "others.jsonl") else v for name, v in fields.items()}
    with pytest.raises(InputError, match=said) as error:
        measured(root, output, **fields)
    assert "\n" not in str(error.value)


def test_models_may_move_the_gate_may_change_and_costs_be_asked_for_later(root, begun, tmp_path, finished, monkeypatch):
    output = tmp_path / "out"
    shutil.copytree(begun, output)
    shutil.copytree(root / "draft", tmp_path / "moved")
    asked = []
    monkeypatch.setattr(stages, "_costs", lambda *_: asked.append("costs") or [])
    report = measured(root, output, draft=str(tmp_path / "moved"), min_speedup=0.01, costs=None)
    assert report["gate"]["passed"] is True and len(finished) == UNITS - 1 and asked == ["costs"]
