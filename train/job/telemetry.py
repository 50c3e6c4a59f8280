"""A run's figures for the log: speed, shares of time, memory, and the time left."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from draftsmith.decode.clock import speed
from draftsmith.decode.progress import Phase, phase
from draftsmith.train.job.flops import known_speed
from draftsmith.train.losses.positions import IGNORED

PHASES = ("teacher", "draft", "loss", "data", "text")
"""The phases of a step: the target's forward; the forward and backward of the trained model; the loss with its
gradients; waiting for batches; text that the draft writes. The rest is the optimizer, communication and the host."""
APART = ("evaluation", "saving")
"""Phases outside steps: their time is in no share, and phases inside them are not told apart."""


class Stopwatch:
    """A clock that divides all time into phases, on the device's own clock.

    Each change of phase leaves a mark: an event in a GPU's queue, or the time on a CPU. The time between two marks
    belongs to the phase that the first one begins; time before the first mark is not counted. Nothing waits for a
    mark: `taken` reads those already passed.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._phases = ["rest"]
        self._marks: deque[tuple[Any, str]] = deque()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as a phase; afterwards the phase before it continues."""
        if self._phases[-1] in APART:
            yield
            return
        self._phases.append(name)
        self._mark()
        try:
            yield
        finally:
            self._phases.pop()
            self._mark()

    def taken(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, up to the last mark passed."""
        seconds: dict[str, float] = defaultdict(float)
        while len(self._marks) > 1 and (self._device.type != "cuda" or self._marks[1][0].query()):
            begin, name = self._marks.popleft()
            end = self._marks[0][0]
            seconds[name] += begin.elapsed_time(end) / 1000 if self._device.type == "cuda" else end - begin
        return dict(seconds)

    def _mark(self) -> None:
        mark: Any = time.perf_counter()
        if self._device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks.append((mark, self._phases[-1]))


class Telemetry:
    """Counts of trained tokens and rows, and the figures of a log line computed from them.

    Counts are this process's, times the number of processes; only loss tokens are summed over all, by the Trainer. They
    stay on the device until a line is written, when the Trainer has waited for the loss anyway.
    """

    def __init__(self, args: TrainingArguments, work: Callable[[float, float, float], float | None]):
        self.clock = Stopwatch(args.device)
        self._args, self._work = args, work
        half = args.bf16 or args.fp16
        name = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else ""
        self._peak = known_speed(name) if half else None  # the float32 peak depends on settings
        self._began: float | None = None
        self._steps = 0
        self._restart()

    def _restart(self) -> None:
        self._rows = self._positions = 0
        self._tokens: Any = 0
        self._seen: Any = 0

    def count(self, batches: list[dict[str, Tensor]], tokens: Any) -> None:
        """Add the batches of a step, and their loss tokens over all processes."""
        self._began, self._steps = self._began or time.perf_counter(), self._steps + 1
        for batch in batches:
            rows, length = batch["labels"].shape
            self._rows += rows
            self._positions += rows * length
            places = batch.get("position_ids")
            self._seen = self._seen + (rows * length * (length + 1) // 2 if places is None else (places + 1).sum())
            if tokens is None:
                self._tokens = self._tokens + self._args.world_size * (batch["labels"] != IGNORED).sum()
        self._tokens = self._tokens + (0 if tokens is None else tokens)

    def entries(self, state: TrainerState) -> dict[str, float]:
        """Return the figures since the last call, and start again.

        `tokens_per_second` (loss tokens) and `samples_per_second` (rows if packed) are over all processes. `time_…` is
        the share of step time of each of `PHASES` and of the `rest`. `mfu`, the share of the devices' peak arithmetic
        that the models need, and `gpu_memory_gib`, this process's peak so far, come where they are known. `hours_left`
        includes evaluations and saving.
        """
        seconds = self.clock.taken()
        total = sum(value for name, value in seconds.items() if name not in APART)
        if total <= 0 or self._began is None:
            return {}
        world, tokens, attended = self._args.world_size, float(self._tokens), float(self._seen)
        figures = {"tokens_per_second": tokens / total, "samples_per_second": self._rows * world / total}
        figures |= {f"time_{name}": seconds.get(name, 0.0) / total for name in (*PHASES, "rest")}
        work = self._work(self._positions, attended, tokens / world)
        if self._peak is not None and work is not None:
            figures["mfu"] = work / total / (self._peak * 1e12)
        if self._args.device.type == "cuda":
            figures["gpu_memory_gib"] = torch.cuda.max_memory_allocated(self._args.device) / 2**30
        step_seconds = (time.perf_counter() - self._began) / self._steps
        figures["hours_left"] = step_seconds * (state.max_steps - state.global_step) / 3600
        self._restart()
        return figures


class TrainingProgress(TrainerCallback):
    """The progress of training and its evaluations as phases: bars on a terminal, and lines in a job's log.

    The library's own callback draws bars everywhere, one line of a log for each step.
    """

    def __init__(self) -> None:
        self._training, self._evaluation = ExitStack(), ExitStack()
        self._steps: Phase | None = None
        self._batches: Phase | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Open the phase of training."""
        if state.is_world_process_zero:
            self._steps = self._training.enter_context(phase("train", state.max_steps, "steps", state.global_step))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Count finished steps."""
        if self._steps is not None:
            self._steps.advance(state.global_step - self._steps.done)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count a batch of an evaluation, whose phase the first one opens."""
        if self._batches is None and state.is_world_process_zero:
            self._batches = self._evaluation.enter_context(phase("evaluate", len(kwargs["eval_dataloader"]), "batches"))
        if self._batches is not None:
            self._batches.advance()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Close the phase of an evaluation."""
        self._evaluation.close()
        self._batches = None

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        """Write a log line above the bar, and note the speed and the largest phases of a step."""
        if self._steps is None or not logs:
            return
        if "tokens_per_second" in logs:
            shares = {name: value for name, value in logs.items() if name.startswith("time_")}
            largest = sorted(shares, key=lambda name: -shares[name])[:3]
            first = ", ".join(f"{name.removeprefix('time_')} {shares[name]:.0%}" for name in largest)
            self._steps.note = f"{speed(logs['tokens_per_second'])} tokens/s: {first}"
        shown = {name: f"{x:.4g}" if isinstance(x, float) else x for name, x in logs.items() if name != "total_flos"}
        tqdm.write(str(shown))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Close the phase of training."""
        self._training.close()
        self._steps = None
