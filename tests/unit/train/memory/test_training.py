"""The plan of a kind of drafter that says no more than what it trains."""

from dataclasses import dataclass

from conftest import tiny_llama
from torch import nn

from draftsmith.train.cli import parse_config
from draftsmith.train.memory.setting import Machines
from draftsmith.train.memory.training import TrainingPlan
from draftsmith.train.recipe import RecipeConfig

ROWS, LENGTH, VOCAB = 2, 16, 97


class Table(nn.Module):
    """The logits of the next token, by the last one."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Embedding(VOCAB, VOCAB)

    def forward(self, ids):
        return self.logits(ids)


@dataclass
class TablePlanConfig(Machines, RecipeConfig):
    """Its plan."""


class TablePlan(TrainingPlan):
    """Its plan."""

    def build(self, lm_heads):
        return Table()


def test_a_kind_is_planned_by_what_it_trains(tmp_path):
    tiny_llama(0, VOCAB).config.save_pretrained(tmp_path)
    argv = ["--target", str(tmp_path), "--completions", "[c]", "--sequence_length", str(LENGTH), "--gpu_memory", "3.01"]
    argv += ["--training.per_device_train_batch_size", str(ROWS), "--training.use_cpu", "true"]
    plan = TablePlan(parse_config(TablePlanConfig, argv))
    table = VOCAB * VOCAB * 4
    held = plan.held(plan.setting)
    assert held["drafter: weights"] == held["drafter: gradients"] == table
    assert held["drafter: optimiser states"] == 2 * table + 4
    moments = {moment.name: moment.parts for moment in plan.moments(plan.setting)}
    assert moments["the loss"]["activations"] == ROWS * LENGTH * (8 + VOCAB * 4)  # tokens and logits
    assert moments["the backward"]["activations"] >= ROWS * LENGTH * VOCAB * 4 + table  # and a gradient
    assert moments["the target's forward"]["target: activations"] > 0
    assert plan.fits(plan.setting) and plan.largest(plan.setting) >= ROWS
    assert plan.hours() > 0 and sum(plan.host_bytes().values()) == 3 * 2**30 + table
    tight = TablePlan(parse_config(TablePlanConfig, [*argv, "--gpu_memory", "3.0002"]))
    assert not tight.fits(tight.setting) and tight.advice()
