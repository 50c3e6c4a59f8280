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


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
REFUSED = [
    ("divergence", {"divergence": "kl"}),
    *(("decay", {"decay": value}) for value in (0.0, float("nan"))),
    ("num_heads", {"num_heads": 0}),
    ("num_layers", {"num_layers": 0}),
    ("draft_vocabulary", {"draft_vocabulary": 0}),
    ("draft_vocabulary", {"heads": "h", "draft_vocabulary": 9}),
    ("lm_heads", {"lm_heads": "tied"}),
    ("backbone", {"backbone": "half"}),
    ("backbone", {"backbone": "full", "target_sharded": True}),
    ("backbone", {"backbone": "full", "target_quantization": "4bit"}),
    ("target_dtype", {"backbone": "full", "target_dtype": "bfloat16"}),
    ("head_learning_rate_multiplier", {"head_learning_rate_multiplier": 0.0}),
    ("warmup_heads", {"warmup_heads": 1.5}),
    ("max_length", {"packing": True}),
    ("optimizer", {"optimizer": "sgd"}),
    ("optimizer", {"backbone": "lora", "optimizer": "muon"}),
    ("training.activation_checkpointing", {"training": {"activation_checkpointing": True}}),
    ("heldout", {"training": EVALUATED}),
]


@pytest.mark.parametrize(("field", "options"), REFUSED)
def test_a_bad_value_is_refused_by_name_and_in_one_line(field, options):
    with pytest.raises(InputError) as error:
        config(**options)
    assert str(error.value).startswith(f"{field}: ") and "\n" not in str(error.value)


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
