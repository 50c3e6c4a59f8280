"""Ranges for the library's TrainingArguments, which accepts numbers that no run can have and then trains or fails."""

from collections.abc import Mapping
from typing import Any

from draftsmith.decode.errors import Range, at_least, finite, more_than, require

COUNT = at_least(1)
RATE = finite(at_least(0))
SEED = Range("a whole number from 0 to 2³² − 1", lambda value: 0 <= value < 2**32)
RANGES: Mapping[str, Range] = {
    "max_steps": Range("at least 0, or -1 for epochs", lambda value: value >= -1),
    "num_train_epochs": finite(more_than(0)),
    "per_device_train_batch_size": COUNT,
    "per_device_eval_batch_size": COUNT,
    "gradient_accumulation_steps": COUNT,
    "learning_rate": RATE,
    "warmup_steps": RATE,
    "weight_decay": RATE,
    "max_grad_norm": RATE,
    "logging_steps": RATE,
    "eval_steps": finite(more_than(0)),
    "save_steps": finite(more_than(0)),
    "dataloader_num_workers": at_least(0),
    "seed": SEED,
    "data_seed": SEED,
}


def require_possible(training: Any) -> None:
    """Raise an InputError that names the first of the TrainingArguments that is out of range."""
    for name, allowed in RANGES.items():
        require(training, allowed, name, prefix="training.")
