"""What choosing is asked for, and its runs."""

import pytest
from conftest import tiny_llama

from draftsmith.decode.errors import InputError
from draftsmith.scripts.choose import sweep
from draftsmith.scripts.choose.config import AlignConfig, ChooseConfig
from draftsmith.scripts.kinds import recipes
from draftsmith.train.cli import flags_of, parse_config

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
        ({"batch_size": "0"}, "batch_size: expected at least 1"),
        ({"temperature": "-1"}, "temperature: expected"),
        ({"draft_length": ""}, "draft_length: expected at least one number"),
        ({"server": "tgi"}, "server: expected one of vllm, sglang"),
        ({"min_speedup": 0.0}, "min_speedup: expected"),
        ({"writing": {"endpoint_model": "m"}}, "writing: endpoint_model: expected --endpoint with it, found none"),
        ({"writing": {"top_q": 1}}, "writing: top_q: "),
        ({"candidates": {"suffix": {"command": "block"}}}, "candidates: expected names of letters.* found 'suffix'"),
        ({"candidates": {"none": {"command": "block"}}}, "candidates: expected names of letters.* found 'none'"),
        ({"candidates": {"..": {"command": "block"}}}, r"candidates: expected names of letters.* found '\.\.'"),
        ({"candidates": {"a/b": {"command": "block"}}}, "candidates: expected names of letters.* found 'a/b'"),
        ({"candidates": {"a": {"layers": 1}}}, "candidates: expected a command out of .*block.* in a, found None"),
    ],
)
def test_bad_settings_are_refused_in_one_line(fields, message):
    with pytest.raises(InputError, match=message) as error:
        AlignConfig(**GIVEN | fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("vocabulary", [64, 20_000])
def test_candidates_of_every_kind_are_configs_of_their_commands(vocabulary, monkeypatch):
    target = tiny_llama(0, 64, layers=12).config
    target.vocab_size, target.num_mtp_layers = vocabulary, 1
    monkeypatch.setattr(sweep, "load_config", lambda *args, **kwargs: target)
    found = sweep.candidates_of(ChooseConfig(**GIVEN, draft="small"))
    assert {fields["command"] for fields in found.values()} == recipes().keys()
    assert list(found)[-1] == "draft" and {"draft-2", "draft-3", "hydra", "eagle", "block-1", "block-2"} < found.keys()
    cut = [fields for fields in found.values() if any("draft_vocabulary" in key for key in fields)]
    assert len(cut) == (0 if vocabulary == 64 else len(found) - 2)  # a given draft has its own, MTP layers draft all
    for server, kinds in (
        ("vllm", {"medusa", "eagle", "block-1", "draft-2"}),
        ("sglang", {"eagle", "block-1", "draft-2"}),
    ):
        served = sweep.candidates_of(ChooseConfig(**GIVEN, server=server))
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
        sweep.candidates_of(config)


def test_what_a_run_goes_on_from_is_a_field_of_its_config():
    for name, recipe in recipes().items():
        fields = recipe.config_class().__dataclass_fields__
        assert recipe.begun in fields
        for start in recipe.made:
            assert any(field.startswith(start.rstrip(".")) for field in fields), (name, start)
