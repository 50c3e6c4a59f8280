"""What choosing is asked for, and its runs."""

import pytest
from conftest import tiny_llama

from draftsmith.decode.errors import InputError
from draftsmith.scripts.choose import command, run
from draftsmith.scripts.choose.config import ChooseConfig
from draftsmith.scripts.choose.forecast import Trial
from draftsmith.scripts.choose.run import COSTS, ChooseRun
from draftsmith.scripts.choose.schedule import Pace
from draftsmith.scripts.kinds import recipes
from draftsmith.scripts.stages import Stages, flags_of
from draftsmith.train.cli import OutOfTime, parse_config

GIVEN = {"target": "t", "prompts": "p", "output": "o", "budget": "20m"}


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("20m", 1200), ("2h", 7200), ("1h30m", 5400), ("1.5h", 5400), ("1m30s", 90)]
)
def test_times_are_read(text, seconds):
    assert ChooseConfig(**GIVEN | {"budget": text}).seconds == seconds


@pytest.mark.parametrize("text", ["", "20", "0m", "m", "1.2.3h", "30m1h", "two hours", "-5m", "infh"])
def test_what_is_no_time_is_refused_in_one_line(text):
    with pytest.raises(InputError, match=r"^budget: expected a time such as 40m, 2h or 1h30m, found"):
        ChooseConfig(**GIVEN | {"budget": text})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"choosing": 1.0}, r"choosing: expected"),
        ({"batch_size": "0"}, r"batch_size: expected at least 1"),
        ({"temperature": "-1"}, r"temperature: expected"),
        ({"draft_length": ""}, r"draft_length: expected at least one number"),
        ({"heldout_prompts": 2}, r"heldout_prompts: expected at least 8"),
        ({"epochs": 0.0}, r"epochs: expected"),
        ({"server": "tgi"}, r"server: expected one of vllm, sglang"),
        ({"endpoint_model": "m"}, r"endpoint_model: expected --endpoint with it, found none"),
        ({"endpoint": "ftp://x"}, r"endpoint: expected a URL"),
        ({"candidates": {"suffix": {"command": "block"}}}, r"candidates: expected names of letters.* found 'suffix'"),
        ({"candidates": {"none": {"command": "block"}}}, r"candidates: expected names of letters.* found 'none'"),
        ({"candidates": {"..": {"command": "block"}}}, r"candidates: expected names of letters.* found '\.\.'"),
        ({"candidates": {"a/b": {"command": "block"}}}, r"candidates: expected names of letters.* found 'a/b'"),
        ({"candidates": {"a": {"layers": 1}}}, r"candidates: expected a command out of .*block.* in a, found None"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(fields, message):
    with pytest.raises(InputError, match=message) as error:
        ChooseConfig(**GIVEN | fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("vocabulary", [64, 20_000])
def test_candidates_of_every_kind_are_configs_of_their_commands(vocabulary, monkeypatch):
    target = tiny_llama(0, 64, layers=12).config
    target.vocab_size, target.num_mtp_layers = vocabulary, 1
    monkeypatch.setattr(run, "load_config", lambda *args, **kwargs: target)
    found = run.candidates_of(ChooseConfig(**GIVEN, draft="small"))
    assert {fields["command"] for fields in found.values()} == recipes().keys()
    assert list(found)[-1] == "draft" and {"draft-2", "draft-3", "hydra", "eagle", "block-1", "block-2"} < found.keys()
    cut = [fields for fields in found.values() if any("draft_vocabulary" in key for key in fields)]
    assert len(cut) == (0 if vocabulary == 64 else len(found) - 2)  # a given draft has its own, MTP layers draft all
    for server, kinds in (
        ("vllm", {"medusa", "eagle", "block-1", "draft-2"}),
        ("sglang", {"eagle", "block-1", "draft-2"}),
    ):
        served = run.candidates_of(ChooseConfig(**GIVEN, server=server))
        assert kinds < served.keys() and "hydra" not in served and ("medusa" in served) == (server == "vllm")
        assert server == "vllm" or served["block-1"]["anchor_guesses"] is False
    for fields in found.values():
        own = {key: value for key, value in fields.items() if key != "command"}
        own |= {"target": "t", "completions": ["c"], "training.output_dir": "o", "training.use_cpu": True}
        config = parse_config(recipes()[fields["command"]].config_class(), flags_of(own))
        assert config.training.learning_rate is None  # what suits the kind and its width


def test_fields_of_candidates_are_checked_before_anything_runs():
    config = ChooseConfig(**GIVEN, candidates={"deep": {"command": "block", "layer": 3}})
    with pytest.raises(InputError, match=r"^candidates: deep: "):
        run.checked_candidates(config)


def test_what_a_run_goes_on_from_is_a_field_of_its_config():
    for name, recipe in recipes().items():
        fields = recipe.config_class().__dataclass_fields__
        assert recipe.begun in fields
        for start in recipe.made:
            assert any(field.startswith(start.rstrip(".")) for field in fields), (name, start)


def choosing(tmp_path, monkeypatch, took) -> ChooseRun:
    """A run of 100 seconds for first trials, in which each takes the given seconds, or fails."""
    config = ChooseConfig(target="t", prompts="p", output=str(tmp_path), budget=f"{200 / (1 - COSTS)}s")
    commands = {"slow": "distill", "heads": "medusa", "other": "distill"}
    run = ChooseRun(config, {name: {"command": commands[name]} for name in took}, tmp_path, [], Stages(tmp_path))
    run.used, run.written = 1, 100.0

    def trial(self, name, rung, until):
        seconds = took[name]
        if isinstance(seconds, Exception):
            raise seconds
        self.spend("training", min(seconds, until - self.spent))
        if self.spent >= until:
            raise OutOfTime
        return Trial(name, 100, seconds, {}), Pace(seconds / 100, 0.0)

    monkeypatch.setattr(ChooseRun, "trial", trial)
    return run


def test_a_slow_candidate_leaves_time_for_one_of_each_other_command(tmp_path, monkeypatch):
    run = choosing(tmp_path, monkeypatch, {"slow": 90.0, "heads": 20.0, "other": 25.0})
    assert run.rung(1, ["slow", "heads", "other"]) == ["heads", "other"]
    assert run.failed.keys() == {"slow"} and run.ledger == {"training": 95.0}


def test_a_later_amount_has_all_of_the_time(tmp_path, monkeypatch):
    run = choosing(tmp_path, monkeypatch, {"slow": 80.0, "heads": 10.0})
    assert run.rung(2, ["slow", "heads"]) == ["slow", "heads"]


@pytest.mark.parametrize("names", [["slow", "heads"], ["heads", "slow"]])
def test_an_error_ends_the_choice_only_where_every_training_failed(tmp_path, monkeypatch, names):
    run = choosing(tmp_path, monkeypatch, {"slow": 900.0, "heads": InputError("heads: expected some")})
    assert run.rung(1, names) == [] and run.failed.keys() == {"slow", "heads"}
    run = choosing(tmp_path, monkeypatch, {"slow": InputError("slow: bad"), "heads": InputError("heads: bad")})
    with pytest.raises(InputError, match=names[-1]):
        run.rung(1, names)


def test_the_plan_counts_the_candidates_that_were_tried(tmp_path, monkeypatch):
    """Of six two had no time: of the four that were tried half go on, and no more are paid for."""
    seen = []
    run = choosing(tmp_path, monkeypatch, {"slow": 1.0})
    run.candidates = {str(number): {"command": "distill"} for number in range(6)}
    run.paces = {str(number): Pace(0.001, 0.0) for number in range(6)}
    monkeypatch.setattr(ChooseRun, "rung", lambda self, rung, names: names[:4])
    monkeypatch.setattr(command, "_costs", lambda run: {})
    monkeypatch.setattr(command, "_chosen", lambda run, tables: "chosen")
    monkeypatch.setattr(command, "another_amount_fits", lambda left, rung, written, paces, n, *_: seen.append(n))
    assert command._halve(run) == "chosen" and seen == [4]
