"""Training on states from servers: a window of its own for each process, and a process that fills it.

The filler asks servers for what its trainer reads next, and writes the same shards as `draftsmith cache --window`. It
ends with its trainer, also if that is killed, and what it wrote stays for the run that resumes.
"""

import fcntl
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import last_norm
from draftsmith.decode.clock import speed
from draftsmith.decode.errors import InputError, first_line
from draftsmith.decode.progress import phase
from draftsmith.train.data.first_look import print_once
from draftsmith.train.data.mapped import Texts, map_completions
from draftsmith.train.files import disk_full_error, identity, remove
from draftsmith.train.job.lock import lock_directory
from draftsmith.train.job.processes import Processes, is_first
from draftsmith.train.models import DTYPES, load_config, resolve_dtype
from draftsmith.train.recipe import RecipeConfig
from draftsmith.train.teacher.cache_config import CacheConfig
from draftsmith.train.teacher.feature_reader import FeatureIndex
from draftsmith.train.teacher.feature_shards import FeatureShards, Layout
from draftsmith.train.teacher.served import AT_ONCE, ServedModel, ServedTarget, is_free, urls_of
from draftsmith.train.teacher.served_check import (
    LENGTHS,
    ask_servers,
    compare_states,
    require_length,
    require_served,
)
from draftsmith.train.teacher.target_ends import read_ends
from draftsmith.train.teacher.window import WindowReader
from draftsmith.train.teacher.window_writer import WindowWriter

ERROR, STATUS, ALIVE = "error.txt", "filler.json", ".filler.lock"
WAITING, LOGS = 0.1, 5
"""The share of its time that training may wait for states, over its last logs, without a line about it."""


@dataclass(frozen=True)
class Filling:
    """A filler's task: where it writes, whom it asks, and which texts there are."""

    directory: Path
    urls: list[str]
    served: ServedModel
    key_env: str | None
    target: str
    completions: list[str]
    output: Path
    window: int
    layout: Layout
    norm: nn.Module | None = None


def fill(filling: Filling, ready: Any) -> None:
    """Fill a window until its trainer has read all or is gone; the trainer reads an error from a file."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    with (filling.directory / ALIVE).open("w") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)  # the kernel frees it when this process ends, however it does
        ready.set()
        try:
            # `is_alive` asks a pipe, which processes that the trainer has forked may hold open.
            fill_window(filling, lambda: os.getppid() == parent.pid)
        except Exception as error:
            raise SystemExit(2) from error  # without a traceback: the trainer raises the error


def fill_window(filling: Filling, going: Callable[[], bool]) -> None:
    """Fill a window while it is `going` and its trainer reads; leave an error in a file."""
    try:
        for leftover in filling.directory.glob(".*.parquet.partial"):  # of a filler that was killed
            remove(leftover)
        _fill_window(filling, going)
    except Exception as error:
        line = first_line(error) if isinstance(error, InputError) else f"teacher: {type(error).__name__}: {error}"
        if disk_full_error(error):
            window = f"{filling.window / 1e9:.3g} GB of space in {filling.directory} for states that servers give"
            line = f"teacher: expected {window}, found the disk full; give another teacher_directory"
        with suppress(OSError):  # on a full disk the lock alone may tell
            (filling.directory / ERROR).write_text(line, encoding="utf-8")
        raise


def _fill_window(filling: Filling, going: Callable[[], bool]) -> None:
    directory, output, layout = filling.directory, filling.output, filling.layout
    options: dict[str, Any] = {"feature_dtype": layout.feature_dtype, "window": filling.window / 1e9}
    config = CacheConfig(filling.target, filling.completions, str(directory), features=True, **options)
    texts = Texts({path: map_completions(path, output) for path in filling.completions})
    shards, began, told = FeatureShards(config, layout), time.monotonic(), 0.0
    writer = WindowWriter(directory, shards, texts, filling.window, Processes(), at_once=AT_ONCE)

    def still_going() -> bool:
        nonlocal told
        if (now := time.monotonic()) - told > 1:
            told = now
            tell()
        return going()

    def tell() -> None:
        status = {name: getattr(writer, name) for name in ("positions", "size", "largest", "waited")}
        (directory / STATUS).write_text(json.dumps(status | {"seconds": time.monotonic() - began}), encoding="utf-8")

    target = ServedTarget(filling.urls, filling.norm, filling.key_env, expected=filling.served)
    with target:
        writer.serve(target, still_going)
        tell()


@dataclass
class ServedWindow(WindowReader):
    """The reading side of a window that a filler fills; `held` keeps other runs out of its directory.

    `shares` are the parts of steps' time spent waiting, by log.
    """

    filling: Filling | None = None
    shares: list[float] = field(default_factory=list)
    told: bool = False
    process: Any = None
    held: ExitStack = field(default_factory=ExitStack)
    _ready: Any = None

    def request_features(self, texts: Sequence[int], lengths: Sequence[int]) -> None:
        """Request the features of texts that are read before training begins, as a `WindowReader` does."""
        self.start()
        super().request_features(texts, lengths)

    def begin(self, *order: Any) -> None:
        """Set the order of the epochs, as a `WindowReader` does, and start the filler."""
        self.start()
        super().begin(*order)

    def start(self) -> None:
        """Start the filler, unless it runs."""
        if self.process is not None:
            return
        assert self.filling is not None
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / ERROR).unlink(missing_ok=True)
        context = multiprocessing.get_context("spawn")  # a fork would share locks of this process's threads
        self._ready = context.Event()
        self.process = context.Process(target=fill, args=(self.filling, self._ready), daemon=True)
        # An interruption is the trainer's: it must not end the filler, nor print anything where that begins.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with phase("starting what asks the servers"):
            while not self._ready.wait(0.1):
                if not self.process.is_alive():
                    raise InputError("teacher: expected a process that fills the window, found that it ended at once")

    def require_written(self) -> None:
        """Raise the filler's error, or one that says that it is gone."""
        with suppress(FileNotFoundError):
            raise InputError((self.directory / ERROR).read_text(encoding="utf-8"))
        with (self.directory / ALIVE).open("r") as alive:
            if not is_free(alive):
                return
        where = f"a process that fills {self.directory}"
        raise InputError(f"teacher: expected {where}, found that it was killed; run the same command again")

    def stop(self) -> None:
        """End the filler at once; what it wrote stays, and another run may use it."""
        if self.process is not None:
            self.process.terminate()
            self.process.join()
        self.held.close()
        for folder in (self.directory, self.directory.parent):
            with suppress(OSError):  # states are left, or other processes still read
                folder.rmdir()

    def waited(self, share: float) -> None:
        """Note the share of its time that training waited since the last log; report it once if it is large."""
        self.shares.append(share)
        late = sum(self.shares[-LOGS:]) / LOGS
        if late > WAITING and len(self.shares) >= LOGS and not self.told:
            self.told = True
            print_once(f"teacher: training waits {late:.0%} of its time for the servers' states")

    def end(self) -> None:
        """Announce that nothing more is read, wait for the filler, and say which side waited."""
        super().end()
        self.process.join(60)
        with suppress(OSError, ValueError):
            print_once(self.summary(json.loads((self.directory / STATUS).read_text(encoding="utf-8"))))
        remove(self.directory)

    def summary(self, status: Mapping[str, float]) -> str:
        """Return a line about the states that were read and about who waited for whom."""
        busy = max(status["seconds"] - status["waited"], 1e-9)
        tokens = max(status["positions"], 1)
        trained = sum(self.shares) / max(len(self.shares), 1)
        return (
            f"teacher: {status['positions']:,} tokens, {speed(tokens / busy)} a second, {status['size'] / tokens:,.0f} "
            f"bytes each; at most {status['largest'] / 1e9:.3g} GB at a time. Training waited {trained:.0%} of its "
            f"time for states, and the servers {status['waited'] / status['seconds']:.0%} for room in the window"
        )


@dataclass(frozen=True)
class ServedIndex(FeatureIndex):
    """The features of a target on servers; all samples are in the window."""

    config: Any = None
    window: Any = None

    def load_target(self, config: RecipeConfig) -> PreTrainedModel:
        """Load the ends of the target from its files into the host's memory; nothing else of it is read."""
        code, device = config.trust_remote_code, config.training.device
        dtype = resolve_dtype(config.target_dtype, config.target, device=device, trust_remote_code=code)
        with phase(f"reading the ends of {config.target}"):
            ends = read_ends(config.target, dtype, trust_remote_code=code)
        served, norm = self.window.filling.served, deepcopy(last_norm(ends))
        norm = None if norm is None else norm.to(DTYPES[served.dtype])
        self.window.filling = replace(self.window.filling, norm=norm)
        return ends

    def of_layers(self, layer_ids: Sequence[int]) -> "ServedIndex":
        """Return the index of the features after some layers, which the servers must give."""
        filling = self.window.filling
        target_config = load_config(self.config.target, trust_remote_code=self.config.trust_remote_code)
        require_served(filling.served, filling.urls[0], target_config, layer_ids)
        layout = replace(self.layout, layer_ids=tuple(layer_ids))
        window = replace(self.window, layout=layout, filling=replace(filling, layout=layout))
        return replace(self, layout=layout, layer_ids=tuple(layer_ids), window=window)

    def feed(self, trainer: Any) -> None:
        """Compare the servers' states with the target, and let the batches hold them."""
        filling = self.window.filling
        longest = max(int(part.sizes.max()) for part in (trainer.data, trainer.eval_dataset) if part is not None)
        require_length(filling.served, longest)
        if is_first():
            ends, data = trainer.target_ends, trainer.data
            pairs = zip(data.members, data.sizes, LENGTHS, strict=False)  # there may be fewer samples
            rows = [data.texts.read(int(at), min(int(size), length))[0].tolist() for at, size, length in pairs]
            compare_states(filling.urls, filling.key_env, self.config.target, ends, rows, self.config.trust_remote_code)
        super().feed(trainer)

    def close(self) -> None:
        """End the process that asks the servers."""
        self.window.stop()


def find_served(config: RecipeConfig) -> ServedIndex:
    """Ask the servers of a config what they serve, require that it is its target, and return their index."""
    urls, code, args = urls_of(config.teacher), config.trust_remote_code, config.training
    served = ask_servers(urls, config.teacher_key_env, config.target, code, config.any_target)
    output = Path(str(args.output_dir))
    directory = Path(config.teacher_directory or output / "teacher") / f"rank-{args.process_index}"
    layout, window = Layout((), served.hidden_size, served.feature_dtype), int(config.teacher_window * 1e9)
    completions = [*config.completions, *config.heldout_directories]
    filling = Filling(
        directory, urls, served, config.teacher_key_env, config.target, completions, output, window, layout
    )
    # What another run left here is of other states, unless this is the same.
    teacher = repr((served.model_copy(update={"model": "", "max_model_len": 0}), identity(config.target)))
    reader = ServedWindow(directory, layout, window, own=True, teacher=teacher, filling=filling)
    with suppress(OSError):  # which the lock names. Processes that try it at once would remove it for each other
        directory.parent.mkdir(parents=True, exist_ok=True)
    reader.held.enter_context(lock_directory(directory, "teacher_directory"))
    nothing = np.empty(0, np.uint64), list[Path](), np.empty((0, 2), np.int64)
    return ServedIndex(*nothing, layout, Path(os.devnull), config=config, window=reader)
