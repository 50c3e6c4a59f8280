"""Plans of heads, teacher caches and completions: what is held, against real tensors; hours, against the arithmetic."""

from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from rich.console import Console

from draftsmith.medusa import MedusaHeads
from draftsmith.medusa.heads.config import MedusaPlanConfig
from draftsmith.medusa.heads.memory import MedusaPlan
from draftsmith.scripts import cli
from draftsmith.scripts.plan import command as plan_command
from draftsmith.scripts.plan.command import report
from draftsmith.train.cli import flags_of, parse_config
from draftsmith.train.job.flops import Work
from draftsmith.train.memory.plan import PROCESS
from draftsmith.train.memory.setting import GIB
from draftsmith.train.runs import save_model

LENGTH, ROWS, VOCAB = 64, 4, 300
SHAPES = Path(__file__).parents[1] / "golden" / "configs"


@pytest.fixture(scope="module")
def target(tokenizer, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "target"
    save_model(tiny_llama(0, len(tokenizer), layers=2, hidden=64), tokenizer, path)
    return path


def argv(target: Path, **options: object) -> list[str]:
    values = {"target": target, "completions": "[c]"} | options
    return flags_of(values)


def heads_plan(target: Path, **options: object) -> MedusaPlan:
    values = {"sequence_length": LENGTH, "training.per_device_train_batch_size": ROWS, "num_heads": 3} | options
    return parse_config(MedusaPlanConfig, [*argv(target, **values), "--training.use_cpu", "true"]).memory_plan()


@pytest.mark.parametrize("options", [{}, {"lm_heads": "shared"}, {"hydra": True}], ids=str)
def test_what_heads_hold_is_what_they_allocate(target, options):
    plan = heads_plan(target, **options)
    config, real = plan.config, tiny_llama(0, VOCAB, layers=2, hidden=64)
    shape = {"hydra": config.hydra, "original_lm_head": config.lm_heads == "shared"}
    heads = MedusaHeads.of_target(real, 3, **shape).requires_grad_(True)
    held = plan.held(plan.setting)
    size = sum(p.nbytes for p in heads.parameters())
    optimizer = torch.optim.AdamW(heads.parameters())
    for parameter in heads.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert held["heads: weights"] == held["heads: gradients"] == size
    assert held["heads: optimiser states"] == states
    assert held["target: weights in float32, whole"] == sum(p.nbytes for p in real.parameters())


def test_adapters_train_little_and_all_of_a_backbone_much(target):
    totals = {}
    for backbone in ("frozen", "lora", "full"):
        plan = heads_plan(target, backbone=backbone)
        totals[backbone] = plan.total(plan.setting)
        held = plan.held(plan.setting)
        if backbone == "lora":
            adapters = sum(p.numel() for n, p in plan.target("float32").named_parameters() if "lora_" in n)
            heads = sum(p.numel() for p in plan.drafter(plan.setting).parameters())
            assert held["trained: gradients"] == 4 * (adapters + heads) and adapters > 0
        if backbone == "full":
            assert held["the target as it was: weights in float32, whole"] > 0
    assert totals["frozen"] < totals["lora"] < totals["full"]


def test_a_cache_leaves_the_head_of_the_target_and_embeddings_if_heads_see_them(target):
    live, cached = heads_plan(target), heads_plan(target, teacher_cache="[features]")
    model = live.target("float32")
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert cached.held(cached.setting)["target: head"] == head.nbytes
    assert cached.total(cached.setting) < live.total(live.setting) and cached.hours() < live.hours()
    hydra = heads_plan(target, teacher_cache="[features]", hydra=True)
    assert hydra.held(hydra.setting)["target: embeddings and head"] == head.nbytes + embeddings.nbytes


def test_what_does_not_fit_gets_advice(target, capsys, monkeypatch):
    plan = heads_plan(target, gpus=2, loss_chunk=2**14)
    assert plan.largest(plan.setting) >= ROWS
    monkeypatch.setattr(plan, "capacity", plan.total(plan.setting) - 1e-4 * GIB)
    assert not report(plan, Console())
    out = capsys.readouterr().out
    assert (
        "→ teacher_cache" in out and "→ lm_heads shared" in out and "→ strategy zero2" in out and "does not fit" in out
    )
    changes = dict(plan.changes())
    assert changes and all(plan.fits(change) for change in changes.values())
    assert plan.largest(plan.setting) < ROWS


def test_hours_are_the_arithmetic_at_the_speed_that_is_assumed(target):
    machines = {"sequence_length": LENGTH, "tokens": 1e9, "gpus": 4, "mfu": 0.5, "device": "A100"}
    speed = 0.5 * 312e12 * 4 * 3600
    work = Work.of(tiny_llama(0, VOCAB, layers=2, hidden=64))
    each = work.forward(1, LENGTH / 2, 1)
    plan = heads_plan(target, **machines, lm_heads="shared")
    of_heads = 3 * 2 * (64 * 64 + 64 * VOCAB) * 3  # forward and backward of three heads
    assert plan.hours() == pytest.approx(1e9 * (each + of_heads) / speed)
    numbers = sum(p.numel() for p in plan.drafter(plan.setting).parameters())
    assert sum(plan.host_bytes().values()) == 4 * PROCESS + 4 * 4 * numbers


def test_short_times_are_said_in_smaller_units(target, capsys, monkeypatch):
    assert [plan_command.time_words(h) for h in (1234.5, 2, 1.9, 0.05, 0.03, 1e-5)] == [
        "1,234 hours", "2.0 hours", "114 minutes", "3.0 minutes", "108 seconds", "0.0 seconds",
    ]  # fmt: skip


def test_a_target_that_is_loaded_otherwise_here_is_told_of(target, capsys, monkeypatch):
    """A GPU loads bfloat16 as it is stored; a CPU without arithmetic for it does not."""
    flags = ["plan", *argv(target, recipe="medusa", sequence_length=LENGTH), "--target_dtype", "auto"]
    for here, told in (("float64", True), ("float32", False)):
        monkeypatch.setattr(plan_command, "fast_dtype", lambda config, device, here=here: here)
        assert cli.main(flags) == 0
        line = f"this machine loads it in {here}, which --target_dtype {here} plans"
        assert (line in capsys.readouterr().out) == told


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"recipe": "export"},
            "recipe: expected one of distill, medusa, eagle, block, mtp",
        ),
        ({"recipe": "medusa", "sequence_length": 9, "heads": "h"}, "found nothing at h"),
        ({"recipe": "medusa", "sequence_length": 9, "draft_vocabulary": 301}, "draft_vocabulary: expected at most 300"),
        ({"recipe": "medusa", "sequence_length": 9, "device": "TPU"}, "device: expected one of B200"),
        ({"recipe": "medusa", "sequence_length": 9, "mfu": 1.5}, "mfu: expected a share"),
    ],
)
def test_bad_input_is_refused_in_one_line(target, capsys, options, said):
    assert cli.main(["plan", *argv(target, **options)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
