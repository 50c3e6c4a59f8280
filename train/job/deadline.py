"""Ends a run of training when its time is over, and keeps what was learned until then."""

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from draftsmith.decode.progress import time_text


class Deadline(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Ends training with the first step that ends after some seconds; the first process's clock decides for all.

    The seconds until a checkpoint are kept with it, and count where the run is resumed from it.
    """

    def __init__(self, seconds: float):
        self.seconds, self._begin = seconds, 0.0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        trained = time.perf_counter() - self._begin
        return {"args": {"seconds": self.seconds}, "attributes": {"trained": trained}}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin to count."""
        # Read here, as the Trainer restores callbacks only on request, with the seconds that were asked for then.
        callbacks: Any = state.stateful_callbacks
        kept = callbacks.setdefault(type(self).__name__, {})
        trained = kept.get("attributes", {}).get("trained", 0.0) if state.global_step else 0.0
        self._begin = time.perf_counter() - trained

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop where the time is over: the step is measured and saved as the others are."""
        over = time.perf_counter() - self._begin >= self.seconds
        if args.world_size > 1:
            word = torch.tensor(over, device=args.device)
            dist.broadcast(word, 0)
            over = bool(word)
        if not over or state.global_step >= state.max_steps:
            return
        control.should_training_stop = True
        # Its epoch ends, too, and with it comes what is done at the end of each.
        control.should_save |= args.save_strategy == "steps"
        control.should_evaluate |= args.eval_strategy == "steps"
        if state.is_world_process_zero:
            print(
                f"training: its {time_text(self.seconds)} are over after step {state.global_step} of {state.max_steps}",
                file=sys.stderr,
            )
