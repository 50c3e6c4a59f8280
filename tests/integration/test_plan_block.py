"""Plans of block drafters: a whole step of their trainer, what is held, and the shape of Qwen3-8B."""

from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from pipelines import block_configured
from torch.utils._pytree import tree_leaves

from draftsmith.medusa.block import __main__ as recipe
from draftsmith.medusa.block.config import BlockPlanConfig
from draftsmith.medusa.block.memory import BlockPlan
from draftsmith.train import launch
from draftsmith.train.cli import parse_config
from draftsmith.train.data.collator import ahead_positions
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.memory.activations import BatchShape, LiveBytes
from draftsmith.train.memory.setting import GIB
from draftsmith.train.runs import save_model

ROWS, LENGTH, SLOTS = 4, 96, 4
CONFIGS = Path(__file__).parents[1] / "golden" / "configs"


@pytest.fixture(scope="module")
def target(tokenizer, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "target"
    model = tiny_llama(0, len(tokenizer), layers=4, hidden=128)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    save_model(model, tokenizer, path)
    return path


def planned(target: Path, **options: object) -> BlockPlan:
    values = {"target": target, "completions": "[c]", "sequence_length": LENGTH, "block_size": SLOTS}
    values |= {"loss_chunk": 2**14, "training.per_device_train_batch_size": ROWS, "training.use_cpu": True} | options
    return parse_config(BlockPlanConfig, [part for k, v in values.items() for part in (f"--{k}", str(v))]).memory_plan()


@pytest.mark.parametrize(
    "options",
    [
        {"layers": 2, "anchor_guesses": False, "markov_rank": 0, "training.activation_checkpointing": True},
        {"packing": True, "max_length": LENGTH, "divergence": "tvd", "markov_rank": 16, "anchors": 10},
        {"training.bf16": True, "draft_vocabulary": 100, "markov_rank": 16},
    ],
    ids=["DFlash, checkpointing", "packed, few anchors", "autocast, cut vocabulary"],
)
def test_a_whole_step_of_the_trainer_takes_what_is_planned(pipeline, target, tmp_path, monkeypatch, options):
    """Target, features, blocks, losses and backward together, at their peak."""
    plan = planned(target, **options)
    training = {name.partition(".")[2]: value for name, value in options.items() if name.startswith("training.")}
    fields = {name: value for name, value in options.items() if not name.startswith(("training.", "packing", "max_"))}
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # training arguments leave theirs there
    monkeypatch.setattr(launch, "run_training", lambda *_: None)
    fields = {"block_size": SLOTS} | fields
    trainer = recipe.train_block(block_configured(pipeline, tmp_path, target=str(target), training=training, **fields))
    trainer.sizes = plan.sizes
    drafter = trainer.heads.train()
    if "training.activation_checkpointing" in options:
        drafter.activation_checkpointing_enable({"use_reentrant": False})
    model = trainer.accelerator.prepare(drafter)
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inputs = BatchShape(LENGTH, ROWS, "packing" in options).inputs(ROWS)
    inputs["index"] = torch.zeros(ROWS, dtype=torch.long)
    if "packing" in options:
        inputs["position_ids"] = torch.arange(LENGTH).repeat(ROWS, 1)
    inputs["labels"] = inputs["input_ids"].clone()
    inputs["labels"][:, 0] = IGNORED
    inputs["positions"] = ahead_positions(inputs["labels"] != IGNORED, drafter.config.guesses)
    head = trainer.frozen_head.weight
    given = [t for m in (drafter, trainer.target) for t in (*m.parameters(), *m.buffers())]
    given += [trainer.teacher_head.weight, head, *(p.grad for p in drafter.parameters())]
    with LiveBytes([*given, *tree_leaves(inputs)]) as live:
        trainer.training_step(model, inputs, torch.tensor(ROWS * (LENGTH - 1)))
    peak = plan.peak(plan.setting)
    # Besides are places and weights of the drawn guesses.
    assert peak.total == pytest.approx(live.peak, rel=0.08), {m.name: m.parts for m in plan.moments(plan.setting)}
    assert peak.total > 2**20
    held = plan.held(plan.setting)
    assert held["heads: weights"] == sum(t.nbytes for t in (*drafter.parameters(), *drafter.buffers()))


def test_the_shape_of_qwen3_8b_fits_one_gpu():
    """DSpark's: five layers on five of the target, 512 blocks of 7 slots behind 4,096 tokens, in bfloat16 autocast."""
    options = {"target_config": CONFIGS / "qwen3-8b.json", "sequence_length": 4096, "training.bf16": True}
    options |= {"layers": 5, "block_size": 7, "anchors": 512, "target_dtype": "bfloat16", "loss_chunk": 2**27}
    plan = planned(Path("Qwen/Qwen3-8B"), **options, **{"training.per_device_train_batch_size": 1})
    assert plan.drafter(plan.setting).config.target_layer_ids == [1, 9, 17, 25, 33]  # z-lab/Qwen3-8B-DFlash-b16
    assert 5.0 < plan.steps(plan.setting).in_loss(1) / GIB < 8.0
    assert plan.peak(plan.setting).total < 16 * GIB
