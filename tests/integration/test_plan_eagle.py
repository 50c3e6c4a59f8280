"""Plans of EAGLE-3 heads: what is held, hours, advice, and what their recipe refuses."""

from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from rich.console import Console

from draftsmith.decode.errors import InputError
from draftsmith.medusa.eagle.config import EaglePlanConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.memory import EaglePlan
from draftsmith.scripts import cli
from draftsmith.scripts.plan.command import report
from draftsmith.train.cli import flags_of, parse_config
from draftsmith.train.job.flops import Work
from draftsmith.train.memory.plan import PROCESS
from draftsmith.train.memory.setting import GIB
from draftsmith.train.runs import save_model

ROWS, LENGTH, STEPS = 4, 96, 2
CONFIGS = Path(__file__).parents[1] / "golden" / "configs"


@pytest.fixture(scope="module")
def target(tokenizer, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "target"
    model = tiny_llama(0, len(tokenizer), layers=4, hidden=128)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    save_model(model, tokenizer, path)
    return path


def argv(target: Path, **options: object) -> list[str]:
    values = {"target": target, "completions": "[c]", "sequence_length": LENGTH, "num_steps": STEPS}
    values |= {"loss_chunk": 2**14, "training.per_device_train_batch_size": ROWS}
    return flags_of(values | options)


def planned(target: Path, **options: object) -> EaglePlan:
    return parse_config(EaglePlanConfig, [*argv(target, **options), "--training.use_cpu", "true"]).memory_plan()


def test_the_shape_of_qwen3_8b_holds_what_was_counted():
    """For the backward of 4 rows of 2,048 tokens and six steps, in bfloat16 autocast; copies of weights beside it."""
    options = {"target_config": CONFIGS / "qwen3-8b.json", "sequence_length": 2048, "training.bf16": True}
    options |= {"draft_vocabulary": 32000, "num_steps": 6, "target_dtype": "bfloat16"}
    kept = {}
    for checkpointing in (False, True):
        more = options | {"training.activation_checkpointing": checkpointing}
        plan = planned(Path("Qwen/Qwen3-8B"), **more)
        in_loss = plan.step_bytes(plan.setting).in_loss
        kept[checkpointing] = (in_loss(ROWS) - in_loss.constant) / GIB
    assert kept[False] == pytest.approx(12.25, rel=0.05) and kept[True] == pytest.approx(2.55, rel=0.1)


def test_hours_are_the_arithmetic_of_the_steps(target):
    plan = planned(target, tokens=1e9, gpus=4, mfu=0.5, device="A100")
    heads = plan.drafter(plan.setting)
    teacher = Work.of(tiny_llama(0, plan.target("float32").config.vocab_size, layers=4, hidden=128))
    maps = {name: p.numel() for name, p in heads.named_parameters() if p.ndim == 2}
    fused, logits = maps.pop("fc.weight"), maps.pop("lm_head.weight")
    attended = 2 * 128 * LENGTH / 2  # scores and values, of all positions before
    each = 2 * (fused + STEPS * (sum(maps.values()) + attended + logits))
    speed = 0.5 * 312e12 * 4 * 3600
    assert plan.hours() == pytest.approx(1e9 * (teacher.forward(1, LENGTH / 2, 1) + 3 * each) / speed)
    again = planned(target, tokens=1e9, gpus=4, mfu=0.5, device="A100", **{"training.activation_checkpointing": True})
    assert again.hours() > plan.hours()
    numbers = sum(p.numel() for p in heads.parameters())
    assert sum(plan.host_bytes().values()) == 4 * PROCESS + 4 * 4 * numbers


def test_heads_to_go_on_from_are_planned_as_they_are(target, tokenizer, tmp_path):
    cut = EagleHeads.of_target(tiny_llama(0, len(tokenizer), layers=4, hidden=128), torch.arange(50), [1, 3])
    cut.save_pretrained(tmp_path / "heads")
    plan = planned(target, heads=tmp_path / "heads")
    assert plan.notes() == [f"{STEPS} steps of one layer, features after layers 1, 3, drafts among 50 of 300 tokens"]
    other = EagleHeads.of_target(tiny_llama(0, len(tokenizer), layers=4, hidden=64))
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="eagle: expected heads with the target's hidden_size 128, found 64"):
        planned(target, heads=tmp_path / "other")


@pytest.fixture(scope="module")
def plan(target) -> EaglePlan:
    """Of two GPUs; what is traced for one test serves the others."""
    return planned(target, gpus=2)


def test_a_cache_leaves_two_ends_of_the_target(target, plan):
    live, cached = plan, planned(target, gpus=2, teacher_cache="[features]")
    held, model = cached.held(cached.setting), live.target("float32")
    assert held["target: embeddings and head"] == sum(
        p.nbytes for p in (model.lm_head.weight, model.model.embed_tokens.weight)
    )
    assert cached.total(cached.setting) < live.total(live.setting) and cached.hours() < live.hours()


def test_servers_leave_what_a_cache_leaves(target):
    cached = planned(target, gpus=2, teacher_cache="[features]")
    served = planned(target, gpus=2, teacher="vllm:http://a:1")
    assert served.held(served.setting) == cached.held(cached.setting) and served.hours() == cached.hours()
    assert "states from servers: 2,048 bytes a token, after layers 1, 2, 3, 4 (the last), in float32" in served.facts()


def test_what_does_not_fit_gets_advice(plan, capsys, monkeypatch):
    assert plan.largest(plan.setting) >= ROWS
    monkeypatch.setattr(plan, "capacity", plan.total(plan.setting) - 1e-4 * GIB)
    assert not report(plan, Console())
    out = capsys.readouterr().out
    assert "does not fit" in out and f"{STEPS} steps of one layer, features after layers 1, 2, 3" in out
    expected = "training.activation_checkpointing true", "strategy zero2", "target_quantization 8bit", "teacher_cache"
    assert all(f"→ {change}" in out for change in expected)
    changes = dict(plan.changes())
    assert changes and all(plan.fits(change) for change in changes.values())
    assert plan.largest(plan.setting) < ROWS


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layer_ids": "[2, 9]"}, "layer_ids: expected ascending depths between 1 and the target's 4 layers"),
        ({"draft_vocabulary": 301}, "draft_vocabulary: expected at most 300, found 301"),
        ({"num_steps": 0}, "num_steps: expected at least 1, found 0"),
        ({"heads": "nowhere"}, "EAGLE-3 heads: expected a model directory or a hub id, found nothing at nowhere"),
        ({"heads": "h", "draft_vocabulary": 9}, "draft_vocabulary: expected none with heads, which have their own"),
        ({"optimizer": "muon", "strategy": "zero2"}, "optimizer: expected trainer for a draft under zero2, found muon"),
        ({"target_sharded": True}, "target_sharded: expected more than one process, found one"),
        ({"training.optim": "galore_adamw"}, "training.optim: expected one of adamw_torch, "),
    ],
)
def test_what_the_recipe_refuses_is_refused_in_the_same_line(target, capsys, options, said):
    assert cli.main(["plan", *argv(target, recipe="eagle", **options)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and said in line


def test_another_family_is_refused(capsys):
    flags = argv(Path("gpt2"), recipe="eagle", target_config=CONFIGS / "gpt2.json")
    assert cli.main(["plan", *flags]) == 2
    assert "target: expected a model whose decoder has its layers in `layers`" in capsys.readouterr().err
