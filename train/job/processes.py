"""Processes that are launched together and divide work: they meet before it and after it, not in between."""

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from draftsmith.decode.errors import InputError
from draftsmith.train.cli import Terminated
from draftsmith.train.job import ranks

LONGEST = timedelta(days=30)  # how long the first process to finish waits for the last

PATIENCE = 5.0  # seconds that a process gets to end before it is killed

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among those that do the same kind of work."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Return whether this process speaks for all."""
        return self.rank == 0

    def title(self, what: str) -> str:
        """Return the title of a progress bar for this process's share."""
        return what if self.count == 1 else f"{what}, 1 of {self.count} processes"

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return this process's items, which do not depend on those already done."""
        return items[self.rank :: self.count]

    def after_the_first(self, work: Callable[[], object]) -> None:
        """Run `work` on the first process before any other continues; all of them raise what it raises."""
        raised: list[Any] = [None]
        if self.first:
            try:
                work()
            except Exception as error:
                raised = [error]
        if self.count > 1:
            distributed.broadcast_object_list(raised)
        if raised[0] is not None:
            raise raised[0]

    def gathered(self, value: T) -> list[T]:
        """Return the values of all processes, once the last one has called this."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def require_shared(self, file: Path) -> None:
        """Require that all processes see a file of the first one; otherwise a machine has a disk of its own there."""
        apart = [host for host in self.gathered("" if file.exists() else socket.gethostname()) if host]
        if apart:
            raise InputError(
                f"output: expected a directory that all machines share, found no {file.name} in {file.parent} on "
                f"{apart[0]}"
            )


def is_first() -> bool:
    """Return whether this process speaks for all that were launched with it; a single one does."""
    return os.environ.get("RANK", "0") == "0"


def keep_few_kernels() -> None:
    """Bound oneDNN's cache of the bfloat16 kernels that it compiles for each shape on a CPU.

    By default it keeps a thousand. Each training step has shapes of its own and adds some 18 MB, while one layer's
    forward and backward need about 15 kernels. Call this before the first forward; environment variables that are set
    stay.
    """
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # oneDNN's cache, and PyTorch's over it
        os.environ.setdefault(variable, "32")


@contextmanager
def terminable() -> Iterator[None]:
    """Let a scheduler's SIGTERM end this block like an interruption, which keeps all finished work."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own = os.getpid()

    def end(number: int, frame: Any) -> None:
        if os.getpid() != own:  # a forked child has nothing to keep
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_session(process: "subprocess.Popen[bytes]") -> None:
    """End a session leader and all that it started: first by SIGTERM, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)


@contextmanager
def join_launched() -> Iterator[Processes]:
    """Join the processes that torchrun or `accelerate launch` started with this one, if there are any.

    They part when the block ends well. If it raises, `ranks.run_rank` ends them all.
    """
    keep_few_kernels()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    # Each process holds a whole model, however accelerate is configured. With this variable set, transformers would
    # read the weights on one process only.
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    was_initialized = distributed.is_initialized()
    if not was_initialized:
        distributed.init_process_group("gloo", timeout=LONGEST)
    ranks.watch("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    yield Processes(distributed.get_rank(), distributed.get_world_size())
    ranks.finish()
    if not was_initialized:
        distributed.destroy_process_group()
