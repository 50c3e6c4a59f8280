"""States from servers: what travels and is stored, and how many servers feed how many trainers.

A server computes a forward of the target for each token and no more, as a training process would. Its speed is given,
measured, or its GPUs' arithmetic at the share that the plan assumes for training; copies of states out of a GPU's
memory are then taken to run while it computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from transformers import PretrainedConfig

from draftsmith.decode.clock import speed
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase
from draftsmith.train.job.flops import DEVICES, Work
from draftsmith.train.models import DTYPES
from draftsmith.train.quantization import arithmetic_of
from draftsmith.train.teacher.served import ServedTarget, urls_of
from draftsmith.train.teacher.served_check import measured_speed, require_served


@dataclass(frozen=True)
class StateServers:
    """Servers of a target's states after some of its layers: all that training reads of each token.

    `speed` is that of one server in tokens a second, None where it is not known, and `source` says how it is known.
    `count` is the number of servers, 0 if the run does not name them; `machines` and `processes` are those that train.
    `window` is what states may take on the disk of each process, in bytes, and `step` are the tokens that it reads in a
    step.
    """

    layer_ids: tuple[int, ...]
    hidden_size: int
    layers: int
    dtype: str
    speed: float | None
    source: str
    count: int
    machines: int
    processes: int
    window: float
    step: int

    @classmethod
    def of(
        cls, config: Any, target: PretrainedConfig, dtype: str, layer_ids: Sequence[int], work: Work | None
    ) -> "StateServers":
        """Return the servers of a planned run, whose config is that of the plan.

        `work` is the target's arithmetic, None where it is not known.
        """
        text = target.get_text_config()
        speed, source = config.teacher_tokens_per_second, "as given"
        gpus, device, numbers = config.teacher_gpus, DEVICES[config.device], arithmetic_of(target)
        if speed is None and gpus is None:
            speed, source = _measured(config, target), "measured now"
        elif speed is None and work is not None:
            times = {"fp8": device.fp8, "fp4": device.fp4}.get(numbers, 1)
            seen = config.sequence_length / 2
            # Linear maps alone are in few bits; a text has logits at its last position only.
            token = work.forward(1, 0, 0) / times + work.forward(0, seen, 0)
            speed = gpus * device.tflops * 1e12 * config.mfu / token
            how = f"{numbers}, {times} times as fast as bfloat16" if times > 1 else "bfloat16"
            source = f"computed: {_of(gpus, 'GPU')}, {work.forward(1, seen, 0) / 1e9:.3g} GFLOP a token in {how}"
        shape = tuple(layer_ids), text.hidden_size, text.num_hidden_layers, dtype
        training, machines = config.training, -(-config.gpus // config.node_gpus)
        step = training.per_device_train_batch_size * training.gradient_accumulation_steps * config.sequence_length
        window = config.teacher_window * 1e9
        return cls(*shape, speed, source, config.teacher_count, machines, config.gpus, window, step)

    @property
    def sent(self) -> int:
        """The bytes of a token that travel: the states after the wanted layers and after the last one."""
        return len({*self.layer_ids, self.layers}) * self.hidden_size * DTYPES[self.dtype].itemsize

    @property
    def stored(self) -> int:
        """The bytes of a token in a window, where the states that the head reads have a place of their own."""
        return (len(self.layer_ids) + 1) * self.hidden_size * (2 if self.dtype == "bfloat16" else 4)

    def rate(self, trained: float) -> float:
        """Return the tokens a second of a run whose trainers alone would reach `trained`."""
        return min(trained, self.count * self.speed) if self.count and self.speed else trained

    def lines(self, trained: float | None) -> list[str]:
        """Return lines about what travels, which side waits, and what networks and disks carry.

        `trained` are the tokens a second that the trainers compute with, None where that is not known.
        """
        depths = "".join(f"{layer}, " for layer in self.layer_ids if layer != self.layers) + f"{self.layers} (the last)"
        lines = [f"states from servers: {self.sent:,} bytes a token, after layers {depths}, in {self.dtype}"]
        if self.speed is None:
            remedy = "give --teacher_tokens_per_second, which draftsmith doctor --teacher measures"
            lines.append(f"no estimate of a server's speed: the target's arithmetic is not known; {remedy}")
        else:
            lines.append(f"a server: {self._flow(self.speed)} ({self.source})")
        if self.window < 2 * (most := self.step * self.stored):
            lines.append(f"two steps of {most / 1e9:.3g} GB must fit a window: --teacher_window {ceil(2 * most / 1e9)}")
        if trained is None:
            return lines
        lines.append(f"the trainers: {self._flow(trained)} at their computed speed")
        if self.speed is not None:
            needed = ceil(trained / self.speed)
            balance = f"{_of(needed, 'server')} feed{'s' * (needed == 1)} these trainers"
            if self.count:
                given, there = self.count * self.speed, _of(self.count, "server")
                waits = f"training waits {1 - given / trained:.0%}" if given < trained else ""
                balance += (
                    f"; with {there} " + (waits or f"the servers wait {1 - trained / given:.0%}") + " of the time"
                )
            lines.append(balance)
        rate = self.rate(trained)
        each, stored = rate * self.sent / self.machines, _gigabytes(rate * self.stored / self.machines)
        total = f"{_gigabytes(rate * self.sent)}, and " if self.machines > 1 else ""
        network = f"the network carries {total}{_gigabytes(each)} ({speed(8 * each / 1e9)} Gbit/s)"
        lines.append(f"{network} to each machine that trains, whose disk writes and reads {stored}")
        seconds = self.processes * self.window / rate / self.stored
        lines.append(f"the processes' windows hold {speed(seconds)} s of training")
        return lines

    def _flow(self, speed: float) -> str:
        return f"{speed:,.0f} tokens/s, {_gigabytes(speed * self.sent)} of states"


def _measured(config: Any, target: PretrainedConfig) -> float:
    """Return the tokens a second of each of a run's servers; raise InputError without answers or of another target."""
    urls = urls_of(config.teacher)
    try:
        with phase("timing the servers"), ServedTarget(urls, key_env=config.teacher_key_env) as teacher:
            assert teacher.served is not None
            require_served(teacher.served, urls[0], target, ())
            return measured_speed(teacher, target.get_text_config().vocab_size) / len(urls)
    except InputError as error:
        raise InputError(f"{error}; a plan without them takes --teacher_gpus") from error


def _of(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
