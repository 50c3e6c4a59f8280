"""The cost of the Trainer: steps of `draftsmith.distill` against a bare PyTorch loop over the same batches.

    python -m draftsmith.scripts.bench.throughput --completions '[runs/quickstart/completions/sampled]'

The bare loop is what one would write by hand: both models' forwards, the forward KL of their logits on the completions,
backward, clipping, AdamW. The two take turns, round by round, from the same weights and in the same order of batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from draftsmith.decode.clock import now
from draftsmith.decode.measurement.intervals import rate_ratio, ratio
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.scripts.bench.common import PairConfig, in_turns, main
from draftsmith.train.data.collator import CompletionCollator
from draftsmith.train.data.examples import TrainingData, training_examples
from draftsmith.train.data.sampler import EpochSampler
from draftsmith.train.losses.divergences import divergence
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.models import load_model, load_tokenizer
from draftsmith.train.trainer import texts

WARMUP = 2


@dataclass
class BenchThroughputConfig(PairConfig):
    """Time the Trainer against a bare loop."""

    completions: list[str]
    """Completion directories to train on."""
    batch_size: int = 16
    """Samples a step."""
    steps: int = 12
    """Timed steps of a round, after two that are not."""
    rounds: int = 7
    """Turns of each."""


@dataclass
class StepClock(TrainerCallback):  # type: ignore[misc]
    """Notes when each step ended."""

    times: list[float] = field(default_factory=list)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.times.append(now())

    def seconds(self) -> float:
        """Return what the steps took, but for those that warm up."""
        return self.times[-1] - self.times[WARMUP - 1]


def with_trainer(config: BenchThroughputConfig, target: PreTrainedModel, train: TrainingData) -> float:
    """Return the seconds that the timed steps took in the Trainer."""
    steps = StepClock()
    with TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            max_steps=config.steps + WARMUP,
            per_device_train_batch_size=config.batch_size,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            save_strategy="no",
            logging_steps=20,
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
            callbacks=[steps],
        )
        trainer.train()
    return steps.seconds()


def by_hand(config: BenchThroughputConfig, target: PreTrainedModel, batches: list[dict[str, Tensor]]) -> float:
    """Return the seconds that the timed steps took in a bare loop."""
    draft = load_model(config.draft).requires_grad_(True).train()
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-3, weight_decay=0.0)
    steps = StepClock()
    for batch in batches:
        inputs = {name: value.to(draft.device) for name, value in texts(batch).items()}
        chosen = batch["labels"][:, 1:].to(draft.device) != IGNORED
        with torch.no_grad():
            p_logits = target(**inputs, use_cache=False).logits[:, :-1][chosen]
        q_logits = draft(**inputs, use_cache=False).logits[:, :-1][chosen]
        loss = divergence(p_logits, q_logits)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # the Trainer looks at its loss too
        steps.on_step_end()
    return steps.seconds()


def bench(config: BenchThroughputConfig) -> dict[str, Any]:
    """Time both in turns; return tokens per second of each, and their ratio with its interval over rounds."""
    train = training_examples(config.completions)
    target = load_model(config.target)
    batches = _batches(train, config)
    tokens = [float(sum((batch["labels"] != IGNORED).sum() for batch in batches[WARMUP:]))] * config.rounds
    calls = {
        "by_hand": partial(by_hand, config, target, batches),
        "trainer": partial(with_trainer, config, target, train),
    }
    turns = [in_turns(calls, turn) for turn in tqdm(range(config.rounds), desc="rounds")]
    trainer, hand = ([turn[name][1] for turn in turns] for name in ("trainer", "by_hand"))
    return {
        "trainer": ratio(tokens, trainer),
        "by_hand": ratio(tokens, hand),
        "trainer_over_by_hand": rate_ratio(tokens, trainer, tokens, hand),
        "median_ratio": median(h / t for h, t in zip(hand, trainer, strict=True)),
    }


def _batches(train: TrainingData, config: BenchThroughputConfig) -> list[dict[str, Tensor]]:
    """Return the Trainer's batches."""
    sampler, collate = EpochSampler(train, TrainingArguments.seed), CompletionCollator(load_tokenizer(config.draft))

    def epochs() -> Iterator[dict[str, Tensor]]:
        for epoch in count():
            sampler.set_epoch(epoch)
            yield from DataLoader(train, config.batch_size, sampler=sampler, collate_fn=collate)

    return list(islice(epochs(), config.steps + WARMUP))


if __name__ == "__main__":
    main(BenchThroughputConfig, bench)
