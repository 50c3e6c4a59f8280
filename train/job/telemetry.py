"""Figures of a run for the person who watches: speed, shares of time, memory, and the time that is left."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments

from draftsmith.train.job.flops import known_device
from draftsmith.train.losses.positions import IGNORED

PHASES = ("teacher", "draft", "loss", "data", "text")
"""What a step is made of: the target's forward; the forward and backward of what is trained; the loss, whose gradients
are taken with it; waiting for batches; text that the draft writes. The rest are the optimiser, its communication, and
the host."""
APART = ("evaluation", "saving")
"""What is no step: their time is not shared out, and phases inside of them are not told apart."""


class Stopwatch:
    """Parts time into phases that add up to all of it, on the device's own clock.

    Each change of phase leaves a mark: an event in the queue of a GPU, or the time on a CPU. What lies between two
    marks is the phase's that the first begins; what is before the first is no one's. Nothing waits for a mark: `taken`
    reads those that are passed.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._phases = ["rest"]
        self._marks: deque[tuple[Any, str]] = deque()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what the block does as a phase; afterwards the phase before it continues."""
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
        """Return the seconds of each phase since the last call, up to the last mark that is passed."""
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
    """Counts what is trained on, and turns it into the figures of a log line.

    Counts are those of this process times the number of processes, but for the loss tokens, which the Trainer sums over
    all of them. They stay on the device until a line is written, when the Trainer has waited for the loss anyway.
    """

    def __init__(self, args: TrainingArguments, work: Callable[[float, float, float], float | None]):
        self.clock = Stopwatch(args.device)
        self._args, self._work = args, work
        half = args.bf16 or args.fp16
        name = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else ""
        self._peak = known_device(name) if half else None  # what float32 reaches depends on settings
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
        """Return the figures since the last call, and begin anew.

        Returns:
            `tokens_per_second`, of the tokens that are learned from, and `samples_per_second`, rows if they are packed,
            over all processes; `time_…`, the share of the steps' time of each of `PHASES` and of the `rest`; where they
            are known `mfu`, the share of the devices' arithmetic that the models need, and `gpu_memory_gib`, this
            process's most so far; `hours_left`, evaluations and saving included.
        """
        seconds = self.clock.taken()
        total = sum(value for name, value in seconds.items() if name not in APART)
        if total <= 0 or self._began is None:
            return {}
        world, tokens, seen = self._args.world_size, float(self._tokens), float(self._seen)
        found = {"tokens_per_second": tokens / total, "samples_per_second": self._rows * world / total}
        found |= {f"time_{name}": seconds.get(name, 0.0) / total for name in PHASES}
        found["time_rest"] = seconds.get("rest", 0.0) / total
        work = self._work(self._positions, seen, tokens / world)
        if self._peak is not None and work is not None:
            found["mfu"] = work / total / (self._peak.tflops * 1e12)
        if self._args.device.type == "cuda":
            found["gpu_memory_gib"] = torch.cuda.max_memory_allocated(self._args.device) / 2**30
        each = (time.perf_counter() - self._began) / self._steps
        found["hours_left"] = each * (state.max_steps - state.global_step) / 3600
        self._restart()
        return found


class TelemetryBar(ProgressCallback):
    """The library's progress bar, with the speed and the largest phases behind it."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Show what a line of the log says of speed, and write the line above the bar."""
        if self.training_bar is not None and logs and "tokens_per_second" in logs:
            shares = {name: value for name, value in logs.items() if name.startswith("time_")}
            largest = sorted(shares, key=lambda name: -shares[name])[:3]
            first = ", ".join(f"{name.removeprefix('time_')} {shares[name]:.0%}" for name in largest)
            self.training_bar.set_postfix_str(f"{logs['tokens_per_second']:.3g} tokens/s: {first}", refresh=False)
        super().on_log(args, state, control, logs=logs, **kwargs)
