"""A whole step of each trainer takes what is planned: target, drafter, losses and backward together, at their peak."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from pipelines import block_configured, configured, eagle_configured, heads_configured, mtp_configured

from draftsmith.distill.__main__ import distill
from draftsmith.medusa.__main__ import train_heads as train_medusa
from draftsmith.medusa.block.__main__ import train_block
from draftsmith.medusa.eagle.__main__ import train_heads
from draftsmith.medusa.mtp.__main__ import train_heads as train_mtp
from draftsmith.scripts.plan.config import plan_config
from draftsmith.train import launch
from draftsmith.train.cli import flags_of, parse_config
from draftsmith.train.data.collator import ahead_positions
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.memory.activations import BatchShape, LiveBytes
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
    "draft, autocast": ("distill", BF16),
    "draft, LK": ("distill", {"divergence": "lk_hybrid"}),
    "parallel": ("distill", PARALLEL),
    "parallel, packed, LK": (
        "distill", PARALLEL | {"divergence": "lk_hybrid"} | PACKED,
    ),
    "Medusa": ("medusa", {"num_heads": 3}),
    "Medusa, one head, autocast, packed": ("medusa", {"num_heads": 3, "lm_heads": "shared"} | BF16 | PACKED),
    "Hydra, cut vocabulary": ("medusa", {"num_heads": 3, "hydra": True, "draft_vocabulary": 100}),
    "EAGLE-3, autocast, cut vocabulary": ("eagle", EAGLE | {"draft_vocabulary": 100, "norm_output": True} | BF16),
    "EAGLE-3, a window, cut vocabulary, LK, checkpointing": (
        "eagle", EAGLE | {"draft_vocabulary": 100, "divergence": "lk_hybrid", "sliding_window": 16} | CHECKPOINTING,
    ),
    "EAGLE-3, packed": (
        "eagle", EAGLE | {"divergence": "lk_hybrid", "fc_norm": True, "target_dtype": "bfloat16"} | PACKED,
    ),
    "DFlash, checkpointing": (
        "block", BLOCK | {"layers": 2, "anchor_guesses": False, "markov_rank": 0} | CHECKPOINTING,
    ),
    "DSpark, a window, packed, few anchors": (
        "block", BLOCK | {"divergence": "tvd", "anchors": 10, "sliding_window": 16} | PACKED,
    ),
    "DFlash 2, packed": (
        "block", BLOCK | {"selector_rank": 16, "markov_rank": 0, "anchor_guesses": False, "layers": 2} | PACKED,
    ),
    "Domino, packed": ("block", BLOCK | {"domino_rank": 16, "markov_rank": 0, "plain_until": 1.0} | PACKED),
    "MTP": ("mtp", {"num_steps": 3}),
    "MTP, a step for each layer, packed": ("mtp", {"num_layers": 2} | PACKED),
    "DSpark, autocast, cut vocabulary": ("block", BLOCK | {"draft_vocabulary": 100} | BF16),
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
    values = paths | {"completions": "[c]", "sequence_length": LENGTH, "loss_chunk": 2**14, "training.use_cpu": True}
    values |= {f"training.per_device_{part}_batch_size": ROWS for part in ("train", "eval")} | options
    values |= {"heldout": "[c]", "training.eval_strategy": "steps", "training.eval_steps": 5}
    argv = ["--recipe", recipe, *flags_of(values)]
    plan = parse_config(plan_config(argv), argv).memory_plan()

    training = {key.partition(".")[2]: value for key, value in options.items() if key.startswith("training.")}
    fields = {key: value for key, value in options.items() if not key.startswith("training.") and key not in PACKED}
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # training arguments leave theirs there
    monkeypatch.setattr(launch, "run_training", lambda *_: None)
    fields |= {key: str(path) for key, path in paths.items()}
    trainer = train(configure(pipeline, tmp_path, training=training, **fields))
    trainer.sizes, trainer.state.max_steps = plan.sizes, 1
    drafter = trainer.model.train()
    if options.keys() & CHECKPOINTING.keys():
        drafter.activation_checkpointing_enable({"use_reentrant": False})
    model = trainer.accelerator.prepare(drafter)
    learned = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    for parameter in learned:
        parameter.grad = torch.zeros_like(parameter)
    inputs = BatchShape(LENGTH, ROWS).inputs(ROWS) | {"index": torch.zeros(ROWS, dtype=torch.long)}
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
    for part in ("teacher_head", "frozen_head"):  # are there before the step
        getattr(trainer, part, None)
    with LiveBytes() as live:
        trainer.training_step(model, inputs, torch.tensor(ROWS * (LENGTH - 1)))
    moments = {moment.name: moment for moment in plan.moments(plan.setting)}
    evaluation, peak = moments.pop("evaluation", None), max(moments.values(), key=lambda moment: moment.total)
    expected = pytest.approx(live.peak, rel=0.03 if "parallel" in options else 0.008)
    assert peak.total == expected, {name: moment.parts for name, moment in moments.items()}
    assert live.now < 100  # nothing waits for Python's collector
    if evaluation is not None:
        drafter.zero_grad()
        drafter.eval()
        with LiveBytes() as live:
            trainer.prediction_step(model, inputs, False)
        assert evaluation.total == pytest.approx(live.peak, rel=0.02 if "parallel" in options else 0.005)
    assert peak.total > 2**20
    held = plan.held(plan.setting)
    assert held[f"{plan.label}: weights"] == nbytes([*drafter.parameters(), *drafter.buffers()])
    assert held[f"{plan.label}: gradients"] == nbytes(gradients)
    weights = nbytes(trainer.target.parameters())
    assert next(size for key, size in held.items() if key.startswith("target: weights")) == weights
    if recipe != "distill" and "draft_vocabulary" in options:  # a loss that weighs acceptance has the whole head
        copied = trainer.teacher_head.weight.nbytes * ("divergence" not in options)
        assert held["target: the head of the tokens that are drafted"] == copied
