"""Training arguments: defaults, what is derived from them, and what is refused."""

import json
import os
from types import SimpleNamespace

import pytest
from transformers import TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from draftsmith.decode.errors import InputError
from draftsmith.distill.config import DistillConfig, DraftInit
from draftsmith.medusa.block.config import BlockTrainingConfig
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.heads.config import MedusaTrainingConfig
from draftsmith.scripts.cli import main
from draftsmith.train.cli import parse_config
from draftsmith.train.job.arguments import RANGES, require_possible
from draftsmith.train.job.defaults import Defaults
from draftsmith.train.options import LoraOptions

FLAGS = ["--target", "t", "--completions", "[c]", "--training.output_dir", "o", "--training.use_cpu", "true"]
DRAFT = ["--draft", "d"]
REFUSED = {
    "max_steps": ("-2",),
    "num_train_epochs": ("0", "-1", "nan", "inf"),
    "learning_rate": ("-1", "nan", "inf"),
    "per_device_train_batch_size": ("0", "-4"),
    "per_device_eval_batch_size": ("0",),
    "gradient_accumulation_steps": ("0",),
    "weight_decay": ("-0.1", "nan"),
    "max_grad_norm": ("-1", "nan"),
    "warmup_steps": ("nan",),
    "save_steps": ("nan",),
    "dataloader_num_workers": ("-1",),
    "seed": ("-1", "4294967296"),
    "data_seed": ("-1",),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_run_can_have_is_named(name):
    for value in REFUSED[name]:
        fields = dict.fromkeys(RANGES) | {name: float(value)}
        with pytest.raises(InputError, match=rf"^training\.{name}: expected .*, found "):
            require_possible(SimpleNamespace(**fields))
    require_possible(TrainingArguments(output_dir="o", use_cpu=True))


@pytest.mark.parametrize("kind", [DistillConfig, MedusaTrainingConfig, EagleTrainingConfig])
def test_every_recipe_looks(kind):
    flags = FLAGS + DRAFT * (kind is DistillConfig)
    with pytest.raises(InputError, match=r"^training\.learning_rate: expected a finite number, at least 0, found -1"):
        parse_config(kind, [*flags, "--training.learning_rate", "-1"])
    parse_config(kind, [*flags, "--training.max_steps", "-1", "--training.num_train_epochs", "0.5"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--training.learning_rat", "1"], r"^training.learning_rat: .*; did you mean training.learning_rate\?$"),
        (["--drft", "d"], r"^drft: expected a field of this command, found none of that name; did you mean draft\?$"),
        (["--nothing-like-it=7"], "^nothing_like_it: expected a field of this command, found none of that name$"),
    ],
)
def test_a_flag_that_there_is_not_is_no_abbreviation_of_another(argv, message):
    with pytest.raises(InputError, match=message):
        parse_config(DistillConfig, [*FLAGS, *argv])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("init: {lora: {dropout_: 2}}", r"^init.lora.dropout_: .*; did you mean init.lora.dropout\?$"),
        ("training: {learning_rat: 2}", r"^training.learning_rat: .*; did you mean training.learning_rate\?$"),
    ],
)
def test_the_nearest_key_of_a_file_is_named(fields, message, tmp_path):
    (tmp_path / "run.yaml").write_text(fields)
    with pytest.raises(InputError, match=message):
        parse_config(DistillConfig, [*FLAGS, "--config", str(tmp_path / "run.yaml")])


def test_the_nearest_command_is_named(capsys):
    assert main(["mesure"]) == 2
    assert capsys.readouterr().err.endswith(", found 'mesure'; did you mean measure?\n")


RUN = ["--target", "t", "--completions", "[c]", "--training.output_dir", "out", "--training.use_cpu", "true"]
CARVED = [*RUN, "--init.layers", "4"]


def test_wider_drafters_learn_at_a_smaller_rate():
    assert [Defaults(1e-2).learning_rate(width) for width in (128, 256, 576, 4064)] == [2e-2, 1e-2, 4.4e-3, 6.3e-4]
    both = Defaults(1e-3, muon_rate=1e-2)
    assert [both.learning_rate(576, muon) for muon in (False, True)] == [4.4e-4, 4.4e-3]


def test_what_nobody_gave_is_the_recipes_own():
    training = parse_config(DistillConfig, CARVED).training
    assert training.learning_rate is None  # until the width is known
    assert (training.lr_scheduler_type, training.warmup_steps, training.logging_steps) == ("cosine", 0.05, 10)
    assert DistillConfig("t", ["c"], draft="d").training.learning_rate is None


def test_what_is_given_wins_in_a_file_and_as_a_flag(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("training: {learning_rate: 5e-5, lr_scheduler_type: linear}\noptimizer: trainer\n")
    config = parse_config(DistillConfig, [*CARVED, "--config", str(file), "--training.warmup_steps", "0"])
    training = config.training
    assert (training.learning_rate, training.lr_scheduler_type, training.warmup_steps) == (5e-5, "linear", 0)
    assert not config.uses_muon(sharded=False)


@pytest.mark.parametrize(
    ("section", "own"),
    [
        ("optimizer", {"type": "AdamW", "params": {"lr": 1e-4}}),
        ("scheduler", {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}),
    ],
)
def test_what_deepspeed_makes_itself_needs_the_rate_at_once(tmp_path, monkeypatch, section, own):
    pytest.importorskip("deepspeed")
    monkeypatch.setattr(os, "environ", os.environ.copy())  # accelerate writes there
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, section: own}))
    flags = [*CARVED, "--training.deepspeed", str(file)]
    try:
        with pytest.raises(InputError, match=rf"^training\.learning_rate: expected the rate of the {section}"):
            parse_config(DistillConfig, flags)
        training = parse_config(DistillConfig, [*flags, "--training.learning_rate", "1e-4"]).training
        params = training.hf_deepspeed_config.config[section]["params"]
        assert params[next(iter(own["params"]))] == 1e-4
    finally:  # DeepSpeed's settings outlive the arguments that name them
        unset_hf_deepspeed_config()


def of(kind, **options):
    training = TrainingArguments("out", use_cpu=True, **options.pop("training", {}))
    return kind("t", ["c"], training=training, **options)


@pytest.mark.parametrize(
    ("config", "muon", "sharded"),
    [
        (of(DistillConfig, init=DraftInit(4)), True, False),
        (of(DistillConfig, init=DraftInit(config={})), True, False),
        (of(DistillConfig, init=DraftInit(4), training={"optim": "adafactor"}), False, False),
        (of(DistillConfig, init=DraftInit(4), optimizer="trainer"), False, False),
        (of(DistillConfig, init=DraftInit(4, lora=LoraOptions())), False, False),
        (of(DistillConfig, draft="d"), False, False),
        (of(DistillConfig, draft="d", optimizer="muon"), True, True),  # and is refused where it is sharded
        (of(MedusaTrainingConfig), False, False),
        (of(EagleTrainingConfig), True, False),
        (of(EagleTrainingConfig, init="last_layer"), False, False),
        (of(EagleTrainingConfig, heads="h"), False, False),
        (of(BlockTrainingConfig), True, False),
        (of(BlockTrainingConfig, heads="h"), False, False),
    ],
)
def test_muon_is_chosen_for_new_drafters_that_are_not_sharded(config, muon, sharded):
    assert (config.uses_muon(sharded=False), config.uses_muon(sharded=True)) == (muon, sharded)


def test_what_was_trained_before_is_changed_less():
    for new, trained in (
        (of(DistillConfig, init=DraftInit(4)), of(DistillConfig, draft="d")),
        (of(MedusaTrainingConfig), of(MedusaTrainingConfig, heads="h")),
        (of(MedusaTrainingConfig), of(MedusaTrainingConfig, backbone="full")),
        (of(EagleTrainingConfig), of(EagleTrainingConfig, heads="h")),
    ):
        assert trained.defaults.rate <= new.defaults.rate / 3
