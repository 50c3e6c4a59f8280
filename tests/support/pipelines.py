"""A pipeline small enough for tests: a random target, a draft, and completions that the target wrote."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import torch
from gemma import save_gemma
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, TrainingArguments

from draftsmith.distill.config import DistillConfig
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.medusa.block.config import BlockTrainingConfig
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.heads.config import MedusaTrainingConfig
from draftsmith.medusa.mtp.config import MtpTrainingConfig
from draftsmith.train import launch
from draftsmith.train.data.examples import TrainingData
from draftsmith.train.data.generate import PrepareConfig, prepare
from draftsmith.train.data.mapped import Texts, map_completions
from draftsmith.train.data.shards import COLUMNS, SCHEMA, write_shard
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.runs import save_model

WORDS = ["def f(x):", "return", "import os", "for i in range(10):", "class A:\n    pass", "x = [1, 2]", "print(x)"]


ADAMW = {"optimizer": "trainer"}  # Muon gives all directions one size, those of last bits too: runs cannot be compared
LAST_BITS = 5e-5
"""What weights may differ by after some steps of 3e-3 on gradients that were summed in another order: AdamW divides by
their size, so that of those that are nearly nothing the last bits make a hundredth of a step. Wrong ones make whole
steps."""


def make_pipeline(root: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write `target`, `draft`, one with dropout (`dropping`), and completions `short`, `long`, `heldout`."""
    from conftest import tiny_llama

    vocab = len(tokenizer)
    draft = tiny_llama(1, vocab, layers=1)
    dropping = tiny_llama(1, vocab, layers=1, attention_dropout=0.2)
    for name, model in {"target": tiny_llama(0, vocab), "draft": draft, "dropping": dropping}.items():
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        save_model(model, tokenizer, root / name)
    return complete_pipeline(root)


def make_gemma_pipeline(root: Path) -> Path:
    """Write what `make_pipeline` does, without `dropping`, of a tiny Gemma 3 and the tokenizer of multimodal ones."""
    save_gemma(root / "target")
    save_gemma(root / "draft", seed=1, layers=1)
    return complete_pipeline(root)


def complete_pipeline(root: Path) -> Path:
    """Write completions `short`, `long` and `heldout` by the target there."""
    for name, count, tokens in (("short", 10, 3), ("long", 10, 12), ("heldout", 5, 9)):
        prompts = [" ".join(WORDS[i % 7 : i % 7 + 1 + i % 3]) for i in range(count)]
        if name == "heldout":
            prompts = [f"# {prompt}" for prompt in prompts]
        (root / f"{name}.txt").write_text("\n".join(p.replace("\n", " ") for p in prompts))
        prepare(
            PrepareConfig(
                str(root / "target"), str(root / f"{name}.txt"), str(root / name), max_new_tokens=tokens, seed=count
            )
        )
    return root


def make_sharp(root: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Write a target whose laws are nearly certain, so that what it wrote can be learned; and 20 texts of it."""
    from conftest import tiny_llama

    model = tiny_llama(0, len(tokenizer), scale=40.0)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    save_model(model, tokenizer, root / "target")
    (root / "prompts.txt").write_text("\n".join(f"x{i} = {'y + ' * (i % 4)}{i}" for i in range(20)))
    prompts, texts = str(root / "prompts.txt"), str(root / "texts")
    prepare(PrepareConfig(str(root / "target"), prompts, texts, max_new_tokens=12, seed=1))
    return str(root / "target"), texts


def configured(pipeline: Path, output: Path, **options) -> DistillConfig:
    return _configured(DistillConfig, pipeline, output, **{"draft": str(pipeline / "draft")} | options)


def heads_configured(pipeline: Path, output: Path, **options) -> MedusaTrainingConfig:
    return _configured(MedusaTrainingConfig, pipeline, output, **{"num_heads": 3} | options)


def eagle_configured(pipeline: Path, output: Path, **options) -> EagleTrainingConfig:
    return _configured(EagleTrainingConfig, pipeline, output, **{"num_steps": 3} | ADAMW | options)


def block_configured(pipeline: Path, output: Path, **options) -> BlockTrainingConfig:
    return _configured(BlockTrainingConfig, pipeline, output, **{"block_size": 3, "markov_rank": 4} | ADAMW | options)


def mtp_configured(pipeline: Path, output: Path, **options) -> MtpTrainingConfig:
    return _configured(MtpTrainingConfig, pipeline, output, **options)


def _configured(kind, pipeline: Path, output: Path, **options):
    training = {"learning_rate": 3e-3, "logging_steps": 1, "save_strategy": "no", "lr_scheduler_type": "constant"}
    training |= {"per_device_train_batch_size": 4, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    training |= options.pop("training", {})
    options = {"completions": [str(pipeline / "short"), str(pipeline / "long")]} | options
    options = {"target": str(pipeline / "target"), "any_target": True} | options
    return kind(training=TrainingArguments(output_dir=str(output), **training), **options)


def write_completions(directory: Path, *shards: list[dict[str, Any]]) -> str:
    """Write samples of `id`, `input_ids` and `labels` as `prepare` writes them, a shard for each list."""
    directory.mkdir(parents=True, exist_ok=True)
    manifest = {"schema": SCHEMA, "settings": {}, "target": {}, "versions": {}, "shards": len(shards)}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    for number, samples in enumerate(shards):
        rows = []
        for sample in samples:
            mask = [int(label != IGNORED) for label in sample["labels"]]
            rows.append({"id": sample["id"], "prompt_length": 1, "input_ids": sample["input_ids"], "loss_mask": mask})
        write_shard(directory / f"shard-{number:05d}.parquet", pa.Table.from_pylist(rows, schema=COLUMNS))
    return str(directory)


def training_data(samples: list[dict[str, Any]]) -> TrainingData:
    """Samples of `id`, `input_ids` and `labels`, as training reads them; those without a label too."""
    with TemporaryDirectory() as directory:  # what is mapped stays there
        path = write_completions(Path(directory), samples)
        return TrainingData(Texts({path: map_completions(path)}), np.arange(len(samples)))


@contextmanager
def measured_on_what_it_learns() -> Iterator[None]:
    """Lift the ban, to see that something is learned."""
    with mock.patch.object(launch, "require_disjoint_prompts"):
        yield


def history(trainer: DistillTrainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def weights(directory: Path | str) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the largest tensor of logits that torch makes."""

    def __init__(self, vocab: int, hidden: int):
        super().__init__()
        self.vocab, self.hidden, self.most = vocab, hidden, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor.shape[-1:] == (self.vocab,) and len(tensor) != self.hidden:
                self.most = max(self.most, tensor.numel())  # heads, turned, are (H, V)
        return out
