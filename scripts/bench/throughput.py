"""What the Trainer costs: steps of `draftsmith.distill` against a bare PyTorch loop over the same batches.

    python -m draftsmith.scripts.bench.throughput --completions '[runs/quickstart/completions/sampled]'

The bare loop is what one would write by hand: both models' forwards, the forward KL of their logits on the completions,
backward, clipping, AdamW. The two take turns, round by round, from the same weights and in the same order of batches.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.trainer_utils import set_seed

from draftsmith.decode.measurement.intervals import format_estimate, rate_ratio, ratio
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.scripts.bench.common import ASSETS
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.collator import IGNORED, CompletionCollator, training_examples
from draftsmith.train.losses.divergences import divergence
from draftsmith.train.models import default_device, load_model, load_tokenizer


@dataclass
class ThroughputConfig:
    """Time the Trainer against a bare loop."""

    completions: list[str]
    """Completion directories to train on."""
    target: str = str(ASSETS / "tiny-target")
    """The teacher."""
    draft: str = str(ASSETS / "tiny-draft")
    """The student."""
    batch_size: int = 16
    """Samples a step."""
    steps: int = 12
    """Timed steps of a round, after two that are not."""
    rounds: int = 7
    """Turns of each."""
    threads: int | None = None
    """CPU threads; the library's default if None."""


@dataclass
class Clock(TrainerCallback):  # type: ignore[misc]
    """Notes when each step ended."""

    times: list[float] = field(default_factory=list)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Note the time."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


WARMUP = 2


def with_trainer(config: ThroughputConfig, target: PreTrainedModel, train: Dataset) -> float:
    """Return the seconds that the timed steps took in the Trainer."""
    clock = Clock()
    with TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            max_steps=config.steps + WARMUP,
            per_device_train_batch_size=config.batch_size,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            save_strategy="no",
            logging_steps=10,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = DistillTrainer(
            load_model(config.draft, device="cpu").requires_grad_(True),
            target,
            load_tokenizer(config.draft),
            DistillConfig(config.target, config.completions, draft=config.draft, training=arguments),
            train,
            callbacks=[clock],
        )
        trainer.train()
    return clock.times[-1] - clock.times[WARMUP - 1]


def by_hand(config: ThroughputConfig, target: PreTrainedModel, batches: list[dict[str, Tensor]]) -> float:
    """Return the seconds that the timed steps took in a bare loop."""
    draft = load_model(config.draft).requires_grad_(True).train()
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-3, weight_decay=0.0)
    clock = Clock()
    for batch in batches:
        moved = {name: value.to(draft.device) for name, value in batch.items() if name != "labels"}
        chosen = batch["labels"][:, 1:].to(draft.device) != IGNORED
        with torch.no_grad():
            p_logits = target(**moved, use_cache=False).logits[:, :-1][chosen]
        q_logits = draft(**moved, use_cache=False).logits[:, :-1][chosen]
        loss = divergence(p_logits, q_logits)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # the Trainer looks at its loss too
        clock.on_step_end()
    return clock.times[-1] - clock.times[WARMUP - 1]


def compare(config: ThroughputConfig) -> dict[str, Any]:
    """Time both in turns.

    Returns:
        Tokens per second of each, and their ratio with its interval over rounds.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    train = training_examples(config.completions)
    target = load_model(config.target)
    tokenizer = load_tokenizer(config.draft)
    order = _order(train, config)
    collate = CompletionCollator(tokenizer)
    batches = [collate([train.select_columns(["input_ids", "labels"])[i] for i in rows]) for rows in order]
    tokens = float(sum((batch["labels"] != IGNORED).sum() for batch in batches[WARMUP:]))
    trainer, hand = [], []
    for turn in tqdm(range(config.rounds), desc="rounds"):
        calls = [
            lambda: trainer.append(with_trainer(config, target, train)),
            lambda: hand.append(by_hand(config, target, batches)),
        ]
        for call in calls if turn % 2 else reversed(calls):
            call()
    each = [tokens] * config.rounds
    return {
        "trainer": ratio(each, trainer),
        "by_hand": ratio(each, hand),
        "trainer_over_by_hand": rate_ratio(each, trainer, each, hand),
        "median_ratio": float(np.median(np.array(hand) / np.array(trainer))),
        "device": str(default_device()),
    }


def _order(train: Dataset, config: ThroughputConfig) -> list[list[int]]:
    """Return the rows of each of the Trainer's batches."""
    set_seed(42)
    sampler = torch.utils.data.RandomSampler(range(len(train)), generator=torch.Generator().manual_seed(42))
    rows: list[int] = []
    while len(rows) < (config.steps + WARMUP) * config.batch_size:
        rows += list(sampler)[: len(train) // config.batch_size * config.batch_size]
    return [rows[i * config.batch_size : (i + 1) * config.batch_size] for i in range(config.steps + WARMUP)]


def main(argv: Sequence[str] | None = None) -> int:
    """Time both, and print their speeds."""
    config = parse_config(ThroughputConfig, argv, prog="python -m draftsmith.scripts.bench.throughput")
    found = compare(config)
    for name in ("trainer", "by_hand"):
        print(f"{name:<12}{found[name].value:8.0f} completion tokens/s")
    ratio = format_estimate(found["trainer_over_by_hand"], "8.3f", spread="interval")
    print(f"ratio       {ratio} over rounds, median of rounds {found['median_ratio']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
