"""TrainingArguments that no run can have are refused by name, in every recipe."""

from types import SimpleNamespace

import pytest
from transformers import TrainingArguments

from draftsmith.decode.errors import InputError
from draftsmith.distill.config import DistillConfig, DistillPlanConfig
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.heads.config import MedusaTrainingConfig
from draftsmith.scripts.cli import main
from draftsmith.train.__main__ import PretrainConfig
from draftsmith.train.cli import parse_config
from draftsmith.train.job.arguments import RANGES, require_possible

FLAGS = ["--target", "t", "--completions", "[c]", "--training.output_dir", "o", "--training.use_cpu", "true"]
DRAFT = ["--draft", "d"]
REFUSED = {
    "max_steps": ("0", "-2"),
    "num_train_epochs": ("0", "-1", "nan", "inf"),
    "learning_rate": ("-1", "nan", "inf"),
    "per_device_train_batch_size": ("0", "-4"),
    "per_device_eval_batch_size": ("0",),
    "gradient_accumulation_steps": ("0",),
    "weight_decay": ("-0.1", "nan"),
    "adam_beta1": ("1", "-1", "nan"),
    "adam_epsilon": ("0", "nan"),
    "max_grad_norm": ("-1", "nan"),
    "warmup_steps": ("nan",),
    "eval_delay": ("-1", "nan"),
    "save_steps": ("nan",),
    "save_total_limit": ("0", "-1"),
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


@pytest.mark.parametrize("kind", [DistillConfig, MedusaTrainingConfig, EagleTrainingConfig, PretrainConfig])
def test_every_recipe_looks(kind):
    flags = FLAGS[4:] if kind is PretrainConfig else FLAGS + DRAFT * (kind is DistillConfig)
    with pytest.raises(InputError, match=r"^training\.learning_rate: expected a finite number, at least 0, found -1"):
        parse_config(kind, [*flags, "--training.learning_rate", "-1"])
    parse_config(kind, [*flags, "--training.max_steps", "-1", "--training.num_train_epochs", "0.5"])


@pytest.mark.parametrize("kind", [DistillConfig, MedusaTrainingConfig, EagleTrainingConfig, PretrainConfig])
def test_options_of_a_schedule_are_looked_at_before_anything_is_loaded(kind):
    flags = FLAGS[4:] if kind is PretrainConfig else FLAGS + DRAFT * (kind is DistillConfig)
    flags = [*flags, "--training.lr_scheduler_type", "warmup_stable_decay", "--training.lr_scheduler_kwargs"]
    for options, message in (
        (
            '{"num_decay_step": 3}',
            "expected options of warmup_stable_decay, found num_decay_step; did you mean num_decay_",
        ),
        ("{}", "expected options that warmup_stable_decay takes, found: "),
        ('{"num_decay_steps": 3, "decay_type": "steep"}', "expected options that warmup_stable_decay takes, found: "),
        ('{"num_decay_steps": 3, "decay_type": "1-sqrt"}', None),
    ):
        if message is None:
            parse_config(kind, [*flags, options])
            continue
        with pytest.raises(InputError, match=f"^training.lr_scheduler_kwargs: {message}"):
            parse_config(kind, [*flags, options])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--training.learning_rat", "1"], r"^training.learning_rat: .*; did you mean training.learning_rate\?$"),
        (["--drft", "d"], r"^drft: expected a field of this command, found none of that name; did you mean draft\?$"),
        (["--init.layer", "2"], r"^init.layer: .*; did you mean init.layers\?$"),
        (["--nothing-like-it=7"], "^nothing_like_it: expected a field of this command, found none of that name$"),
    ],
)
def test_a_flag_that_there_is_not_is_no_abbreviation_of_another(argv, message):
    with pytest.raises(InputError, match=message):
        parse_config(DistillConfig, [*FLAGS, *argv])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("drft: d", r"^drft: .*; did you mean draft\?$"),
        ("init: {layerz: 2}", r"^init.layerz: .*; did you mean init.layers\?$"),
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


@pytest.mark.parametrize(
    ("name", "value"), [("gpu_memory", ".nan"), ("tokens", ".inf"), ("mfu", "-1"), ("gpu_memory", "0")]
)
def test_a_plan_needs_machines_that_there_can_be(name, value):
    with pytest.raises(InputError, match=f"^{name}: expected a finite number, more than 0, found "):
        parse_config(DistillPlanConfig, [*FLAGS, *DRAFT, "--sequence_length", "64", f"--{name}", value])
