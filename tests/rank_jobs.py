"""What the ranks of distributed tests do: imported once, by the server that they are forked from."""

import gc
import os
import shutil
from pathlib import Path
from typing import Any

import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401
from ranks import enter, witness
from roads import configured
from torch import nn
from transformers import conversion_mapping

from draftsmith.distill import __main__ as command
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.train.data import IGNORED

# What each rank would do anew: half a second of regular expressions, and looking through what was imported.
conversion_mapping.get_checkpoint_conversion_mapping("llama")
gc.freeze()


def distilled(
    strategy: str, road: Path, output: Path, runs: dict[str, dict[str, Any]], launched: bool = False
) -> dict[str, dict[str, Any]]:
    """Distil several times, one run after the other; return of each what it ran on, logged and saw.

    A run is the options of a `DistillConfig`; batches are 4 in one process and 2 in each of two, if it says nothing.
    `resumes` is a checkpoint to begin from.
    """
    return {name: _distilled(strategy, road, output / name, dict(options), launched) for name, options in runs.items()}


def _distilled(strategy: str, road: Path, output: Path, options: dict[str, Any], launched: bool) -> dict[str, Any]:
    entered = enter(strategy, launched)
    batch = 4 if strategy == "one" else 2
    defaults = {"max_steps": 8, "per_device_train_batch_size": batch, "per_device_eval_batch_size": 2}
    training = defaults | options.pop("training", {}) | entered
    checkpoint = options.pop("resumes", None)
    if checkpoint is not None and os.environ.get("RANK", "0") == "0":
        shutil.copytree(checkpoint, output / Path(checkpoint).name)
    config = configured(road, output, training=training, temperature=0.9, **options)
    if checkpoint is not None:
        config.training.distributed_state.wait_for_everyone()
    trainer, seen = _watched(config)
    share = next(trainer.target.get_decoder().parameters())
    return {
        **seen,
        "ran": witness(trainer),
        "log": trainer.state.log_history,
        "best": trainer.state.best_model_checkpoint,
        "target": (type(share).__name__, getattr(share, "_local_tensor", share).numel() / share.numel()),
    }


def _watched(config: Any) -> tuple[DistillTrainer, dict[str, list[Any]]]:
    """Distil, and say what each forward of training saw (`texts`), and how often it computed a layer (`layers`)."""
    texts: list[list[list[int]]] = []
    layers: list[int] = []
    step, compute = DistillTrainer.training_step, DistillTrainer.compute_loss

    def counting(self: Any, model: Any, *args: Any) -> Any:
        decoder = self.accelerator.unwrap_model(model).get_decoder()
        first = next(part for part in decoder.modules() if isinstance(part, nn.ModuleList))[0]
        calls: list[int] = []
        hook = next(first.children()).register_forward_pre_hook(lambda *_: calls.append(1))
        loss = step(self, model, *args)
        hook.remove()
        layers.append(len(calls))
        return loss

    def reading(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows = zip(inputs["input_ids"], inputs["labels"], strict=True)
        texts.append([ids[labels != IGNORED].tolist() for ids, labels in rows])
        return compute(self, model, inputs, *args, **kwargs)

    DistillTrainer.training_step, DistillTrainer.compute_loss = counting, reading
    try:
        return command.distill(config), {"texts": texts, "layers": layers}
    finally:
        DistillTrainer.training_step, DistillTrainer.compute_loss = step, compute
