"""A whole step of each trainer takes what is planned: target, drafter, losses and backward together, at their peak."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from pipelines import block_configured, configured, eagle_configured, heads_configured, mtp_configured

from draftsmith.distill.__main__ import distill
from draftsmith.medusa.block.__main__ import train_block
from draftsmith.medusa.eagle.__main__ import train_heads
from draftsmith.medusa.heads.__main__ import train_heads as train_medusa
from draftsmith.medusa.mtp.__main__ import train_heads as train_mtp
from draftsmith.scripts.plan import planned_run
from draftsmith.train import launch
from draftsmith.train.cli import flags_of
from draftsmith.train.data.examples import ahead_positions
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.memory.trace import BatchShape, LiveBytes
from draftsmith.train.runs import save_model

ROWS, LENGTH = 4, 96
CHECKPOINTING, BF16 = {"training.activation_checkpointing": True}, {"training.bf16": True}
PACKED = {"packing": True, "max_length": LENGTH}
RECIPES = {
    "distill": (configured, distill),
    "eagle": (eagle_configured, train_heads),
    "block": (block_configured, train_block),
    "medusa": (heads_configured, train_medusa),
    "mtp": (mtp_configured, train_mtp),
}
PARALLEL = {"parallel": 4, "parallel_mask_token": 1, "parallel_retention": 1.0}  # all masks, none by chance
EAGLE, BLOCK = {"num_steps": 2}, {"block_size": 4, "markov_rank": 16}
STEPS = {
    "draft, checkpointing": ("distill", CHECKPOINTING),
    "draft, autocast, LK": ("distill", {"divergence": "lk_hybrid"} | BF16),
    "parallel, packed, LK": ("distill", PARALLEL | {"divergence": "lk_hybrid"} | PACKED),
    "Medusa, one head, autocast, packed": ("medusa", {"num_heads": 3, "lm_heads": "shared"} | BF16 | PACKED),
    "Hydra, cut vocabulary": ("medusa", {"num_heads": 3, "hydra": True, "draft_vocabulary": 100}),
    "Medusa-2 with LoRA, checkpointing": ("medusa", {"num_heads": 2, "backbone": "lora"} | CHECKPOINTING),
    "EAGLE-3, a window, cut vocabulary, LK, checkpointing": (
        "eagle", EAGLE | {"draft_vocabulary": 100, "divergence": "lk_hybrid", "sliding_window": 16} | CHECKPOINTING,
    ),
    "EAGLE-3, packed": ("eagle", EAGLE | {"fc_norm": True, "target_dtype": "bfloat16"} | PACKED),
    "DFlash 2, packed": (
        "block", BLOCK | {"selector_rank": 16, "markov_rank": 0, "anchor_guesses": False, "layers": 2} | PACKED,
    ),
    "DSpark, autocast, cut vocabulary": ("block", BLOCK | {"draft_vocabulary": 100, "anchors": 10} | BF16),
    "MTP": ("mtp", {"num_steps": 3}),
}  # fmt: skip


def nbytes(tensors) -> int:
    return sum(t.nbytes for t in {id(t): t for t in tensors}.values())


@pytest.fixture(scope="module")
def models(tokenizer, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("plan")
    for name, layers in (("target", 4), ("draft", 1)):
        model = tiny_llama(0, len(tokenizer), layers=layers, hidden=128)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        save_model(model, tokenizer, root / name)
    return {name: root / name for name in ("target", "draft")}


@pytest.mark.parametrize("name", STEPS)
def test_a_whole_step_of_the_trainer_takes_what_is_planned(pipeline, models, tmp_path, monkeypatch, name):
    recipe, options = STEPS[name]
    (configure, train), paths = RECIPES[recipe], {"target": models["target"]}
    paths |= {"draft": models["draft"]} if recipe == "distill" else {}
    values = paths | {"completions": "[c]", "max_length": LENGTH, "loss_chunk": 2**16, "training.use_cpu": True}
    values |= {f"training.per_device_{part}_batch_size": ROWS for part in ("train", "eval")} | options
    values |= {"heldout": "[c]", "training.eval_strategy": "steps", "training.eval_steps": 5}
    argv = [recipe, *flags_of(values)]
    command, config, machines = planned_run(argv)
    plan = command.memory_plan(config, machines)

    training = {key.partition(".")[2]: value for key, value in options.items() if key.startswith("training.")}
    fields = {key: value for key, value in options.items() if not key.startswith("training.") and key not in PACKED}
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # training arguments leave theirs there
    monkeypatch.setattr(launch, "run_training", lambda *_: None)
    fields |= {key: str(path) for key, path in paths.items()}
    trainer = train(configure(pipeline, tmp_path, training=training, **fields))
    trainer.sizes, trainer.state.max_steps, trainer._first_loss = plan.trainer.sizes, 1, None
    drafter = trainer.model.train()
    if options.keys() & CHECKPOINTING.keys():
        drafter.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    model = trainer.accelerator.prepare(drafter)
    learned = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    for parameter in learned:
        parameter.grad = torch.zeros_like(parameter)
    inputs = BatchShape(LENGTH, ROWS).inputs() | {"index": torch.zeros(ROWS, dtype=torch.long)}
    if "packing" in options:
        inputs["position_ids"] = torch.arange(LENGTH).repeat(ROWS, 1)
    inputs["labels"] = inputs["input_ids"].clone()
    inputs["labels"][:, 0] = IGNORED
    inputs["positions"] = ahead_positions(inputs["labels"] != IGNORED, trainer.ahead)
    if recipe == "distill" and "parallel" in options:
        inputs["host"] = {k: np.asarray(v) for k, v in inputs.items() if k in ("position_ids", "index")}
        inputs["host"]["positions"] = inputs["positions"][0].numpy()
        inputs["chains"] = trainer._draw_chains(inputs)
    gradients = [parameter.grad for parameter in learned]
    with LiveBytes() as live:
        trainer.training_step(model, inputs, torch.tensor(ROWS * (LENGTH - 1)))
    moments = dict(plan.moments)
    evaluation = moments.pop("evaluation")
    assert max(moments.values()) == pytest.approx(live.peak, rel=0.03 if "parallel" in options else 0.008), moments
    kept = live.now  # copies of the target's head; nothing else waits for Python's collector
    assert kept < 100 + nbytes(
        getattr(trainer, name).weight for name in ("teacher_head", "frozen_head")[: 1 + (recipe in ("block", "mtp"))]
    )
    drafter.zero_grad()
    drafter.eval()
    with LiveBytes() as live:
        trainer.prediction_step(model, inputs, False)
    assert evaluation == pytest.approx(kept + live.peak, rel=0.02 if "parallel" in options else 0.01)
    assert max(moments.values()) > 2**20
    held, joint = plan.held, config.trains_target
    assert joint or held[f"{plan.label}: weights"] == nbytes([*drafter.parameters(), *drafter.buffers()])
    assert held[f"{'trained' if joint else plan.label}: gradients"] == nbytes(gradients)
    weights = nbytes(trainer.target.parameters())
    assert next(size for key, size in held.items() if key.startswith("target: weights")) == weights
