"""Training step by step: batches as the trainer makes them, gradients that are compared, runs that are killed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import Sizes
from torch import Tensor
from transformers import Trainer, TrainerCallback

from draftsmith.train.cli import run
from draftsmith.train.data.examples import training_examples
from draftsmith.train.losses.chunked import ChunkSizes


def some_samples(pipeline: Path) -> list[dict]:
    """Completions of 3 and of 12 tokens, after prompts of different lengths."""
    return list(training_examples([str(pipeline / "short"), str(pipeline / "long")]))[6:14]


def batch_of(trainer: Trainer, samples: list[dict]) -> dict[str, Tensor]:
    ((batch,), _) = trainer.get_batch_samples(iter([trainer.data_collator(samples)]), 1, torch.device("cpu"))
    return batch


def assert_same(found: Tensor, expected: Tensor, parameters: list[Tensor]) -> None:
    """The same value and the same gradients, of float32, whose sums each instruction set rounds, against float64."""
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    one = torch.autograd.grad(expected, parameters, allow_unused=True)
    found.backward()
    largest = max(float(gradient.abs().max()) for gradient in one if gradient is not None)
    for parameter, gradient in zip(parameters, one, strict=True):
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        expected_own = torch.zeros_like(parameter) if gradient is None else gradient
        assert (own - expected_own).abs().max() < 5e-5 * largest
        parameter.grad = None


def assert_autocast_rounds(trainer: Any, samples: list[dict]) -> None:
    """Autocast changes the loss of heads by its rounding and no more."""
    batch = batch_of(trainer, samples)
    whole = trainer.compute_loss(trainer.heads, batch)
    with torch.autocast("cpu", torch.bfloat16):
        half = trainer.compute_loss(trainer.heads, batch)
    assert half.item() == pytest.approx(whole.item(), rel=0.02) and half.item() != whole.item()


def assert_logits_in_chunks(trainer: Any, samples: list[dict]) -> None:
    """Neither a step nor an evaluation of heads 32 wide holds more logits than a chunk of 8 positions."""
    vocab, batch = len(trainer.processing_class), batch_of(trainer, samples)
    trainer.sizes = ChunkSizes(8 * vocab, 4 * vocab)
    with Sizes(vocab, 32) as sizes:
        trainer.compute_loss(trainer.heads, batch).backward()
        trainer.prediction_step(trainer.heads, batch, False)
    assert sizes.most == 8 * vocab


class Killed(Exception):
    pass


class KillAfterSave(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        raise Killed


def error_line(main: Callable[[list[str]], int], capsys, argv: list[str]) -> str:
    """Run a command; it must refuse with exit code 2 and say why in one line."""
    capsys.readouterr()
    assert run(lambda: main(argv)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line and "%|" not in line]  # bars of work done
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]
