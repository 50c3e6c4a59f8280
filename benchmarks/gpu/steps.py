"""Training steps at Qwen3-8B's shape, as the configs for it have them: speed, and memory next to the plan's."""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import yaml  # type: ignore[import-untyped]
from transformers import PreTrainedModel

from benchmarks.common import ASSETS
from benchmarks.gpu.shapes import SIZES, TINY_TOKENS, completions, directory, lone_model
from draftsmith.scripts.kinds import recipes
from draftsmith.train.cli import flags_of, parse_config
from draftsmith.train.files import remove
from draftsmith.train.kinds.kind import Recipe
from draftsmith.train.launch import TrainingRun
from draftsmith.train.memory.machines import GIB, Machines
from draftsmith.train.models import set_attention

if TYPE_CHECKING:
    from benchmarks.gpu.cases import Place

CONFIGS = {
    f"{path.parent.name} {path.stem}": path
    for command in recipes()
    for path in sorted((ASSETS.parent / "configs" / command).glob("qwen3-8b*.yaml"))
}
"""The configs for Qwen3-8B, by command and name."""
ATTENTION = ("flash_attention_2", "sdpa", "flex_attention")
TOKENS, STEPS = 4096, 6
LOGGED = 2
"""Steps of a line of the log; the last line is kept."""
TINY_FIELDS = {"draft_vocabulary": 512, "mask_token": TINY_TOKENS, "layers": 2, "anchors": 16}
"""In place of the configs' on a CPU."""


def run_class(recipe: Recipe, target: PreTrainedModel) -> type[Any]:
    """Return a recipe's run, on a target that is in memory."""
    module = import_module(f"{recipe.package}.__main__")
    bases = (each for each in vars(module).values() if isinstance(each, type) and issubclass(each, TrainingRun))
    base: Any = next(each for each in bases if each.__module__ == module.__name__)

    class InMemory(base):  # type: ignore[misc]
        def load_target(self) -> PreTrainedModel:
            set_attention(target, self.config.attn_implementation)
            return target

    return InMemory


def step(name: str, attention: str | None, place: "Place") -> dict[str, Any]:
    """Train a few steps of one row of 4,096 tokens; return the speed, and the peak of memory next to the plan's."""
    file, output = CONFIGS[name], place.folder / "steps"
    recipe = recipes()[file.parent.name]
    length = TOKENS if place.full else 64
    values: dict[str, Any] = {
        "config": file,
        "target": directory("8B", place),
        "completions": [str(completions(length, place))],
        "heldout": [],
        "any_target": True,
        "max_length": length,
        "training.output_dir": output,
        "training.max_steps": STEPS if place.full else 1,
        "training.logging_steps": LOGGED if place.full else 1,
        "training.per_device_train_batch_size": 1,
        "training.gradient_accumulation_steps": 1,
        "training.save_strategy": "no",
        "training.eval_strategy": "no",
        "training.eval_on_start": False,
        "training.load_best_model_at_end": False,
        "training.report_to": "none",
        "training.use_cpu": not place.full,
    }
    if attention is not None:
        values["attn_implementation"] = attention
    fields = yaml.safe_load(file.read_text(encoding="utf-8"))
    if "draft" in fields:  # random weights of its size in its place
        values |= {"draft": None, "init.config": SIZES["0.6B"] if place.full else {"num_hidden_layers": 2}}
    if not place.full:
        values |= {name: value for name, value in TINY_FIELDS.items() if name in fields}
    remove(output)  # of a process that was ended
    config = parse_config(recipe.config_class(), flags_of(values))
    run = run_class(recipe, lone_model("8B", place))
    if place.full:
        torch.cuda.reset_peak_memory_stats()
    trainer = run(config).train()
    entries = [entry for entry in trainer.state.log_history if "tokens_per_second" in entry]
    shares = ("tokens_per_second", "mfu", "time_teacher", "time_draft", "time_loss", "time_rest")
    figures = {share: entries[-1].get(share) for share in shares}
    figures["peak_gib"] = torch.cuda.max_memory_allocated() / GIB if place.full else None
    del trainer, run
    gc.collect()
    remove(output)
    plan = recipe.memory_plan(
        parse_config(recipe.config_class(), flags_of(values | {"training.use_cpu": True})), Machines()
    )
    return figures | {"planned_gib": plan.total / GIB}
