"""Training step by step: batches as the trainer makes them, gradients that are compared, runs that are killed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from draftsmith.train.cli import run
from draftsmith.train.data.examples import training_examples


def some_samples(pipeline: Path) -> list[dict]:
    """Completions of 3 and of 12 tokens, after prompts of different lengths."""
    return list(training_examples([str(pipeline / "short"), str(pipeline / "long")]))[6:14]


def batch_of(trainer: Trainer, samples: list[dict]) -> dict[str, Tensor]:
    ((batch,), _) = trainer.get_batch_samples(iter([trainer.data_collator(samples)]), 1, torch.device("cpu"))
    return batch


def assert_same(found: Tensor, expected: Tensor, parameters: list[Tensor]) -> None:
    """The same value and the same gradients, of float32 against laws in float64."""
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    one = torch.autograd.grad(expected, parameters, allow_unused=True)
    found.backward()
    largest = max(float(gradient.abs().max()) for gradient in one if gradient is not None)
    for parameter, gradient in zip(parameters, one, strict=True):
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        expected_own = torch.zeros_like(parameter) if gradient is None else gradient
        assert (own - expected_own).abs().max() < 1e-5 * largest
        parameter.grad = None


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
