"""Ends a run of training when its time is over, and keeps what was learned until then."""

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from draftsmith.decode.progress import time_text


class Deadline(TrainerCallback):  # type: ignore[misc]
    """Ends training with the first step that ends after some seconds; the first process's clock decides for all."""

    def __init__(self, seconds: float):
        self.seconds, self._begin = seconds, 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin to count."""
        self._begin = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop where the time is over: the step is measured and saved as the others are."""
        over = torch.tensor(time.perf_counter() - self._begin >= self.seconds, device=args.device)
        if args.world_size > 1:
            dist.broadcast(over, 0)
        if not over or state.global_step >= state.max_steps:
            return
        control.should_training_stop = True
        control.should_save = args.save_strategy != "no"
        control.should_evaluate = args.eval_strategy != "no"
        if state.is_world_process_zero:
            print(
                f"training: its {time_text(self.seconds)} are over after step {state.global_step} of {state.max_steps}",
                file=sys.stderr,
            )
