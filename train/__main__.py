"""Pretrain a small language model on the standard library: how the embedded target and the stock draft were made.

`python -m draftsmith.train --config configs/train/tiny-target.yaml`
"""

import math
import sys
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from draftsmith.decode.errors import at_least, require
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.corpus import Module, stdlib_modules, train_bpe
from draftsmith.train.job.arguments import require_possible
from draftsmith.train.job.checkpointed import CheckpointedTrainer
from draftsmith.train.job.optimizer import MuonAdamW
from draftsmith.train.runs import last_checkpoint, save_model


@dataclass
class PretrainConfig:
    """Settings of a causal LM, trained on nine tenths of the modules and evaluated on the others."""

    training: TrainingArguments
    """The Trainer's arguments; `output_dir` receives checkpoints and, in `final/`, the model."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config, a Llama's unless `model_type` names another family; the vocabulary and special
    tokens come from the tokenizer."""
    tokenizer: str | None = None
    """A directory with a tokenizer; by default one of `vocab_size` entries is trained on the corpus."""
    vocab_size: int = 4096
    """Entries of a tokenizer trained here."""
    block_size: int = 512
    """Tokens of a training sequence; modules are joined by the end-of-text token and cut."""
    resume: bool = True
    """Continue from the last checkpoint in `output_dir` if there is one."""

    def __post_init__(self) -> None:
        require(self, at_least(2), "block_size")
        require_possible(self.training)


def pack(modules: list[Module], tokenizer: PreTrainedTokenizerBase, block_size: int) -> Dataset:
    """Join modules with end-of-text tokens and cut them into blocks of token ids; drop the incomplete last block."""
    encoded = tokenizer([module.source for module in modules], verbose=False)["input_ids"]
    stream = list(chain.from_iterable([*ids, tokenizer.eos_token_id] for ids in encoded))
    blocks = [stream[i : i + block_size] for i in range(0, len(stream) - block_size + 1, block_size)]
    return Dataset.from_dict({"input_ids": blocks, "labels": blocks})


def pretrain(config: PretrainConfig) -> Path:
    """Train a model and return its directory (bfloat16 safetensors and tokenizer)."""
    set_seed(config.training.seed)
    modules = stdlib_modules()
    train, heldout = [m for m in modules if not m.heldout], [m for m in modules if m.heldout]
    if config.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer)
    else:
        tokenizer = train_bpe((m.source for m in train), config.vocab_size)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "max_position_embeddings": config.block_size}
    fields = {"model_type": "llama", "use_cache": False, **sizes, **special, **config.model}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    args = config.training
    trainer = CheckpointedTrainer(
        model=model,
        args=args,
        train_dataset=pack(train, tokenizer, config.block_size),
        eval_dataset=pack(heldout, tokenizer, config.block_size),
        data_collator=default_data_collator,
        optimizers=(MuonAdamW(model, lr=args.learning_rate, weight_decay=args.weight_decay), None),
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir) if config.resume else None)
    metrics = trainer.evaluate()
    trainer.log({"eval_perplexity": math.exp(metrics["eval_loss"])})
    trainer.save_state()
    final = Path(str(args.output_dir)) / "final"
    if trainer.is_world_process_zero():
        model.config.use_cache = True
        model.generation_config = GenerationConfig(**special)
        save_model(model.to(torch.bfloat16), tokenizer, final)
    return final


def main() -> None:
    """Train, and print where the model is."""
    print(f"model: {pretrain(parse_config(PretrainConfig, prog='python -m draftsmith.train'))}")


if __name__ == "__main__":
    sys.exit(run(main))
