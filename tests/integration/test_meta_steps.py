"""Training and evaluation on tensors without data: a value that is looked at, which a GPU's host waits for, raises.

A step is what the trainer itself does with a batch that is on the device: the models' forwards, the loss, the backward.
Of an evaluation's batch, which is replayed, the host sums the chain of rounds from one copy of their probabilities.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import RECIPES
from torch import Tensor, nn
from transformers import TrainingArguments

from draftsmith.decode.cache.kernels import CudaKernels
from draftsmith.distill.config import DraftInit
from draftsmith.train import launch
from draftsmith.train.losses.cut_vocabulary import CutVocabulary
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache
from draftsmith.train.trainer import RecipeTrainer

PACKED = {"packing": True, "max_length": 64}
QWEN = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
CUT = {"init": DraftInit(draft_vocabulary=50)}
STEPS = {
    "draft": ("draft", {"divergence": "lk_hybrid"} | QWEN),
    "draft, cached": ("draft", {"cache": True}),
    "draft, packed and cached": ("draft", {"cache": True} | PACKED),
    "draft, cached states": ("draft", {"cache": "states", "divergence": "tvd"} | CUT),
    "draft, cut vocabulary": ("draft", {"divergence": "lk_hybrid"} | CUT),
    "draft, prompts too": ("draft", {"prompt_loss": True}),
    "parallel": ("draft", {"parallel": 3}),
    "parallel, cached": ("draft", {"parallel": 3, "cache": True} | PACKED),
    "Medusa": ("medusa", {}),
    "Medusa, cut vocabulary": ("medusa", {"draft_vocabulary": 50}),
    "Hydra": ("medusa", {"hydra": True}),
    "Hydra, cached": ("medusa", {"hydra": True, "cache": "states"} | PACKED),
    "Medusa, joint": ("medusa", {"backbone": "lora"}),
    "EAGLE-3": ("eagle", {}),
    "EAGLE-3, packed": ("eagle", PACKED),
    "EAGLE-3, cut vocabulary": ("eagle", {"draft_vocabulary": 50, "divergence": "lk_hybrid", "prompt_loss": True}),
    "MTP": ("mtp", {}),
    "MTP, a step for each layer": ("mtp", {"num_layers": 2}),
    "DSpark": ("block", {}),
    "DFlash": ("block", {"markov_rank": 0, "anchor_guesses": False, "layers": 2}),
    "DSpark, packed": ("block", {"divergence": {"cross_entropy": 0.1, "tvd": 1.8}, "confidence": 1.0} | PACKED),
    "DFlash 2": ("block", {"markov_rank": 0, "selector_rank": 8, "anchor_guesses": False}),
    "Domino": ("block", {"markov_rank": 0, "domino_rank": 8, "causal": True}),
    "DSpark, cut vocabulary": ("block", {"draft_vocabulary": 50, "divergence": "cross_entropy", "dpace": 0.5}),
}


def without_data(value: Any, seen: set[int] | None = None) -> Any:
    """Return what holds tensors with tensors that have no data; arrays, and what belongs on the host, stay."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, nn.Module):  # in the precision that GPUs learn in
        return value.to("meta", torch.bfloat16)
    if isinstance(value, dict):
        return {key: without_data(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_data, value))
    if isinstance(value, CutVocabulary):
        vars(value).update({name: without_data(each) for name, each in vars(value).items()})
    elif is_dataclass(value) and not isinstance(value, type | TrainingArguments):
        tensors = {f.name: getattr(value, f.name) for f in fields(value) if f.name != "spans_E"}
        return replace(value, **{name: without_data(t) for name, t in tensors.items() if isinstance(t, Tensor)})
    return value


@pytest.fixture(scope="module")
def caches(pipeline, tmp_path_factory) -> dict[bool | str, str]:
    found = {}
    data = [str(pipeline / name) for name in ("short", "long", "heldout")]
    for name, options in {True: {"k": 8}, "states": {"features": True, "layer_ids": []}}.items():
        found[name] = str(tmp_path_factory.mktemp("cache"))
        make_cache(CacheConfig(str(pipeline / "target"), data, found[name], **options))
    return found


@pytest.fixture
def on_meta(pipeline: Path, tmp_path: Path, caches: dict, monkeypatch) -> Callable[[str], tuple[RecipeTrainer, dict]]:
    """Builds a trainer and its first batch by the command, and takes their data away."""

    def build(name: str) -> tuple[RecipeTrainer, dict]:
        recipe, options = STEPS[name]
        train, configure = RECIPES[recipe]
        options = dict(options)
        if cache := options.pop("cache", False):
            options |= {"teacher_cache": [caches[cache]]}
        monkeypatch.setattr(launch, "run_training", lambda *_: None)
        trainer = train(configure(pipeline, tmp_path / "out", heldout=[str(pipeline / "heldout")], **options))
        loader = iter(trainer.get_train_dataloader())
        monkeypatch.setattr(TrainingArguments, "device", torch.device("meta"))
        for attribute, value in vars(trainer).items():
            if isinstance(value, Tensor | nn.Module | CutVocabulary):
                setattr(trainer, attribute, without_data(value))
        # Autocast knows no such device.
        autocast, is_enabled = torch.autocast, torch.is_autocast_enabled
        monkeypatch.setattr(torch, "autocast", lambda device, **options: autocast("cpu", **options))
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: is_enabled("cpu"))
        return trainer, loader

    return build


@pytest.mark.parametrize("name", STEPS)
def test_a_step_looks_at_no_value(on_meta, name):
    trainer, loader = on_meta(name)
    batch = without_data(next(loader))
    (batch,), tokens = trainer.get_batch_samples(iter([batch]), 1, torch.device("meta"))
    with CudaKernels() as kernels:
        loss = trainer.training_step(trainer.model, batch, tokens)
    assert loss.device.type == "meta" and loss.shape == ()
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    attends = name != "Hydra, cached"  # the target alone has attention there
    assert bool(kernels.chosen) == attends and "math" not in kernels.chosen
    assert trained and all(p.grad is not None for p in trained)


EVALUATIONS = {
    "draft": 1,
    "draft, cached": 1,
    "draft, cut vocabulary": 1,
    "parallel": 2,  # of blocks of masks, and plain ones
    "parallel, cached": 2,
    "Medusa": 1,
    "Medusa, cut vocabulary": 1,
    "Medusa, joint": 1,
    "Hydra": 1,
    "EAGLE-3": 1,
    "EAGLE-3, cut vocabulary": 1,
    "DSpark": 1,
    "DSpark, cut vocabulary": 1,
}


@pytest.mark.parametrize(("name", "copies"), EVALUATIONS.items())
def test_an_evaluation_looks_at_no_value_but_the_rounds(on_meta, monkeypatch, name, copies):
    trainer, _ = on_meta(name)
    batch = without_data(next(iter(trainer.get_eval_dataloader())))
    looked_at = []

    def copied(tensor: Tensor) -> Tensor:
        looked_at.append(tensor)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    monkeypatch.setattr(Tensor, "cpu", copied)
    _, sums, _ = trainer.prediction_step(trainer.model.eval(), batch, False)
    assert sums.device.type == "meta" and len(sums) == len(batch["labels"])
    assert len(looked_at) == copies
