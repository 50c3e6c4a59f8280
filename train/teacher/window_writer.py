"""The writing side of a window: `draftsmith cache --window`, or a filler that asks servers."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import Phase, phase
from draftsmith.decode.validation import read
from draftsmith.train.data.mapped import Texts
from draftsmith.train.job.processes import Processes
from draftsmith.train.teacher.feature_shards import FeatureShards, Teacher
from draftsmith.train.teacher.sources import Source, Text
from draftsmith.train.teacher.window import POLL, PORTION, READER, Order, Portion, Position


@dataclass
class WindowWriter:
    """The writing side of a window: `draftsmith cache --window`.

    `texts` are all that a run may request, and `window` is in bytes, over all processes. `at_once` portions are written
    at a time, so that a server is not idle at the end of each. `samples`, `positions` and `size` (bytes) count what was
    written; `largest` is the most that was on disk at a time, and `waited` the seconds without room.
    """

    directory: Path
    shards: FeatureShards
    texts: Texts
    window: int
    processes: Processes
    at_once: int = 1
    samples: int = 0
    positions: int = 0
    size: int = 0
    largest: int = 0
    waited: float = 0.0
    _writing: dict[str, tuple[Future[None], int]] = field(default_factory=dict)
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, teacher: Teacher, going: Callable[[], bool] = lambda: True) -> None:
        """Write the features that a training run reads next, and remove old ones, until the run ends.

        If it is no longer `going`, what was written stays for a run that resumes. Raise InputError if the run reads
        other texts, or steps that the window has no room for.
        """
        with phase(self.processes.title("feature window")) as bar, ThreadPoolExecutor(self.at_once) as pool:
            bar.advance(0, "waits for a training run")
            try:
                while (position := self._position()) is None or not position["done"]:
                    if not going():
                        return
                    began = position is not None and self._step(position, teacher, pool, bar)
                    if not began:
                        time.sleep(POLL)
                        self.waited += 0.0 if self._writing or position is None else POLL
            finally:
                teacher.end()  # before the pool waits for its threads
        self._remove(lambda run, epoch, portion: True)
        self.processes.gathered(None)
        if self.processes.first:
            for file in (*self.directory.glob("order-*.npz"), self.directory / READER):
                file.unlink(missing_ok=True)

    def _step(self, position: Position, teacher: Teacher, pool: ThreadPoolExecutor, bar: Phase) -> bool:
        """Remove the portions that were read and begin others; return False if none is missing or there is no room."""
        for name in [name for name, (writing, _) in self._writing.items() if writing.done()]:
            self._writing.pop(name)[0].result()
            bar.advance(0, f"{self.samples} samples written, {self.size / 1e9:.3g} GB")
        now, runs = (position["epoch"], position["portion"]), (position["run"], position["heldout"])
        stored = self._remove(
            lambda run, epoch, portion: run not in runs or (run == position["run"] and (epoch, portion) < now)
        )
        share, began = self.window // self.processes.count, False
        room = share - sum(stored.values()) - sum(most for _, most in self._writing.values())
        self.largest = max(self.largest, share - room)
        wanted = [portion for portion in self._wanted(position) if portion.name not in self._writing]
        for at, portion in enumerate(wanted):
            if portion.name in stored:
                continue
            if portion.most > share // 2:  # the next portion must be written while this one is read
                needed, found = f"two steps of {portion.most / 1e9:.3g} GB in each process", f"{share / 1e9:.3g} GB"
                raise InputError(f"window: expected room for {needed}, found {found}")
            # A run that resumed at an earlier step needs room that portions of later steps take.
            for later in [later.name for later in wanted[:at:-1] if later.name in stored]:
                if portion.most > room:
                    room += stored.pop(later)
                    (self.directory / later).unlink(missing_ok=True)
            if portion.most > room or len(self._writing) == self.at_once:
                break
            writing = pool.submit(self._write, self.directory / portion.name, portion, teacher)
            self._writing[portion.name] = writing, portion.most
            room, began = room - portion.most, True
        return began

    def _wanted(self, position: Position) -> Iterator[Portion]:
        """Yield the next portions that this process writes, in reading order; held-out ones are read at any time."""
        heldout = self._portions(position["heldout"], 0, 0)
        for epoch in (position["epoch"], position["epoch"] + 1):
            first = position["portion"] if epoch == position["epoch"] else 0
            for portion in self._portions(position["run"], epoch, first):
                yield portion
                yield from heldout
        yield from heldout

    def _portions(self, run: str, epoch: int, first: int) -> Iterator[Portion]:
        """Yield this process's portions of an epoch, from number `first`; none before the run has written its order."""
        with suppress(FileNotFoundError):
            portions = _portions(self.directory, run, epoch)
            mine = [at for at in range(first, len(portions)) if at % self.processes.count == self.processes.rank]
            yield from (portions[at] for at in mine)

    def _write(self, path: Path, portion: Portion, teacher: Teacher) -> None:
        places = np.searchsorted(self._hashes, portion.texts, sorter=self._order)
        numbers = self._order[np.minimum(places, len(self._order) - 1)]
        if missing := int((self._hashes[numbers] != portion.texts).sum()):
            text = "completions: expected all that the training run reads"
            raise InputError(f"{text}, found none of {missing} of its texts")
        numbers = np.unique(numbers)
        names, marks = self.texts.ids(numbers), self._hashes[numbers].view(np.int64).tolist()
        read_texts: list[Text] = [
            (name, self.texts.read(number, portion.max_length)[0].tolist(), [])
            for name, number in zip(names, numbers.tolist(), strict=True)
        ]
        positions = sum(self.shards.positions(text) for text in read_texts)
        source = Source(self.directory, path.name, tuple(zip(names, marks, strict=True)), positions)
        self.shards.write(path, source, read_texts, teacher, lambda _: None)
        with self._counting:
            self.samples += len(numbers)
            self.positions += positions
            self.size += path.stat().st_size

    @cached_property
    def _hashes(self) -> np.ndarray:
        return self.texts.column("text")

    @cached_property
    def _order(self) -> np.ndarray:
        return self._hashes.argsort(kind="stable")

    def _position(self) -> Position | None:
        try:
            return read(Position, self.directory / READER)
        except FileNotFoundError:
            return None

    def _remove(self, gone: Callable[[str, int, int], bool]) -> dict[str, int]:
        """Remove the portions of this process that are `gone`, and return the bytes of the others by name."""
        stored = dict[str, int]()
        for file in self.directory.glob("*.parquet"):
            name = PORTION.fullmatch(file.name)
            if name is None or int(name["portion"]) % self.processes.count != self.processes.rank:
                continue
            if gone(name["run"], int(name["epoch"]), int(name["portion"])):
                file.unlink(missing_ok=True)
            elif file.name not in self._writing:
                stored[file.name] = file.stat().st_size
        return stored


@lru_cache(maxsize=4)
def _portions(directory: Path, run: str, epoch: int) -> list[Portion]:
    """Return the portions of an epoch; FileNotFoundError until the run has written its order."""
    return Order.load(directory / f"order-{run}-{epoch}.npz").portions(run, epoch)
