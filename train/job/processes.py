"""Processes that are launched together and share work out: they meet before it and after it, and not in between."""

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

LONGEST = timedelta(days=30)
"""How long the first to finish waits for the last."""

PATIENCE = 5.0
"""Seconds for a process that was asked to end."""

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """One of some processes that do the same kind of work."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this one speaks for all."""
        return self.rank == 0

    def title(self, what: str) -> str:
        """Return what a bar is called that shows this one's share."""
        return what if self.count == 1 else f"{what}, 1 of {self.count} processes"

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return the items that are this one's to work on: the same whatever is done of them already."""
        return items[self.rank :: self.count]

    def after_the_first(self, work: Callable[[], None]) -> None:
        """Let the first process do something before any of them goes on; what it raises, all of them raise."""
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
        """Return what all of them have to say, once the last of them does."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def require_shared(self, file: Path) -> None:
        """Require that all of them see a file that the first has written.

        Raises:
            InputError: some machines have a disk of their own there.
        """
        apart = [host for host in self.gathered("" if file.exists() else socket.gethostname()) if host]
        if apart:
            raise InputError(
                f"output: expected a directory that all machines share, found no {file.name} in {file.parent} on "
                f"{apart[0]}"
            )


def is_first() -> bool:
    """Say whether this process speaks for all that were launched with it; the only one does."""
    return os.environ.get("RANK", "0") == "0"


def keep_few_kernels() -> None:
    """Bound what oneDNN keeps of the bfloat16 kernels that it builds for each shape on a CPU.

    Each step of a training has shapes of its own, and a thousand kernels are kept by default: some 18 MB a step. One
    layer, forwards and backwards, needs about 15. Called before the first forward; what the environment says stays.
    """
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # oneDNN's, and that of PyTorch's layer
        os.environ.setdefault(variable, "32")


@contextmanager
def terminable() -> Iterator[None]:
    """Let a scheduler's SIGTERM end this block as an interruption does, which keeps what it can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own = os.getpid()

    def end(number: int, frame: Any) -> None:
        if os.getpid() != own:  # a process that was forked here has nothing to keep
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_session(process: "subprocess.Popen[bytes]") -> None:
    """End a process that leads a session, with all that it started: asked to first, and then killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)


@contextmanager
def launched() -> Iterator[Processes]:
    """Join the processes that torchrun or `accelerate launch` started with this one; alone there is nothing to join.

    They are left when the block ends well. Where it raises, `ranks.run_rank` ends them all.
    """
    keep_few_kernels()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    # Each holds a whole model of its own, whatever accelerate is configured for: the library would read it on one.
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
