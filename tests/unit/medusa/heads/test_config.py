"""What a training run of Medusa heads is told: each wrong value is named, in one line."""

import pytest
from transformers import TrainingArguments

from draftsmith.decode.errors import InputError
from draftsmith.medusa.heads.config import MedusaTrainingConfig
from draftsmith.train.cli import parse_config
from draftsmith.train.losses.objective import Objective
from draftsmith.train.options import LoraOptions


def config(training: dict | None = None, **options) -> MedusaTrainingConfig:
    arguments = TrainingArguments(output_dir="out", use_cpu=True, report_to=[], **(training or {}))
    return MedusaTrainingConfig(**{"target": "t", "completions": ["c"], "training": arguments} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads: expected at least 1, found 0"),
        ({"num_layers": 0}, "num_layers: expected at least 1, found 0"),
        ({"draft_vocabulary": 0}, "draft_vocabulary: expected at least 1, found 0"),
        ({"lm_heads": "tied"}, "lm_heads: expected one of own, shared, found 'tied'"),
        ({"backbone": "half"}, "backbone: expected one of frozen, lora, full, found 'half'"),
        ({"divergence": "expected_length"}, "divergence: expected none of expected_length, reached_tvd"),
        ({"divergence": {"reached_tvd": 1.0, "tvd": 1.0}}, "divergence: expected none of expected_length, reached_tvd"),
        ({"divergence": "kl"}, "divergence: expected one of forward_kl"),
        ({"divergence": {"tvd": 0.0}}, "divergence: expected weights above 0, found 0.0 for tvd"),
        ({"divergence": "reverse_kl", "top_k": 5}, "divergence: expected a finite divergence under top_k or top_p"),
        ({"eta": -1.0}, "eta: expected at least 0, found -1.0"),
        ({"temperature": 0.0}, "temperature: expected more than 0, found 0.0"),
        ({"decay": 0.0}, "decay: expected more than 0, found 0.0"),
        ({"decay": float("nan")}, "decay: expected more than 0, found nan"),
        ({"head_learning_rate_multiplier": 0.0}, "head_learning_rate_multiplier: expected more than 0, found 0.0"),
        ({"warmup_heads": 1.5}, "warmup_heads: expected a share between 0 and 1, found 1.5"),
        ({"heads": "h", "draft_vocabulary": 9}, "draft_vocabulary: expected none with heads"),
        ({"packing": True}, "max_length: expected the tokens of a packed row, found none"),
        ({"optimizer": "sgd"}, "optimizer: expected one of auto, trainer, muon, found 'sgd'"),
        ({"backbone": "lora", "optimizer": "muon"}, "optimizer: expected trainer where the backbone is trained too"),
        ({"backbone": "full", "target_dtype": "bfloat16"}, "target_dtype: expected float32 where all of the"),
        ({"backbone": "full", "target_sharded": True}, "backbone: expected frozen for a target that is sharded or"),
        ({"backbone": "lora", "target_device": "cpu"}, "backbone: expected frozen for a target that is sharded or"),
        ({"backbone": "full", "target_quantization": "4bit"}, "backbone: expected frozen or lora for a target that is"),
        ({"training": {"activation_checkpointing": True}}, "training.activation_checkpointing: expected false for a"),
        (
            {"training": {"eval_strategy": "steps", "eval_steps": 1}},
            "heldout: expected completion directories for training.eval_strategy",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value),
)
def test_a_bad_value_is_refused_by_name_and_in_one_line(options, message):
    with pytest.raises(InputError) as error:
        config(**options)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_the_objective_is_that_of_the_deployment():
    assert config(divergence="jsd", temperature=0.7).objective == Objective({"jsd": 1.0}, 0.7)
    mixed = config(divergence={"tvd": 1.0, "cross_entropy": 0.2}, top_k=5, top_p=0.9)
    assert mixed.objective == Objective({"tvd": 1.0, "cross_entropy": 0.2}, 1.0, 5, 0.9)


def test_flags_and_files_reach_every_field(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "target: t\ncompletions: [c]\nbackbone: lora\nlora: {r: 4, target_modules: [q_proj]}\nwarmup_heads: 0.25\n"
        "divergence: {forward_kl: 1.0, cross_entropy: 0.1}\n"
        "training: {output_dir: out, use_cpu: true, activation_checkpointing: true}\n"
    )
    found = parse_config(MedusaTrainingConfig, ["--config", str(tmp_path / "config.yaml"), "--num-heads", "3"])
    assert (found.num_heads, found.backbone, found.warmup_heads) == (3, "lora", 0.25)
    assert found.lora == LoraOptions(r=4, target_modules=["q_proj"])
    assert found.divergence == {"forward_kl": 1.0, "cross_entropy": 0.1}
    assert found.training.activation_checkpointing
    with pytest.raises(InputError, match=r"lora\.r: expected at least 1, found 0") as error:
        parse_config(MedusaTrainingConfig, ["--config", str(tmp_path / "config.yaml"), "--lora.r", "0"])
    assert "\n" not in str(error.value)
