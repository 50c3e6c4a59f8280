"""A window of a cache of features: written just before it is read, and removed behind it. It is never whole on disk.

The features of 10⁹ tokens are 38 TB. But a training run reads them in an order that is known beforehand, one step
after the other. So two commands share a directory, and files alone tell each how far the other is; they may run on
different machines, and either can be stopped and started again:

* the training run writes `order-RUN-E.npz`, in which order it reads texts in epoch E, divided into portions, and
  `reader.json`, which portion it has come to;
* `draftsmith cache --window` writes `RUN-E-P.parquet`, the features of portion P, for as many portions in advance as
  the window has room for, and removes those that were read. They are shards like those of a whole cache.

RUN tells this order from others: portions that are there when a run is resumed need not be written again.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import TypedDict

from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import Phase, phase
from draftsmith.decode.validation import Count, read
from draftsmith.train.data.examples import TrainingData
from draftsmith.train.data.mapped import Texts
from draftsmith.train.data.sampler import EpochSampler
from draftsmith.train.data.shards import read_shard
from draftsmith.train.files import written_aside
from draftsmith.train.job.processes import Processes, is_first
from draftsmith.train.teacher.feature_shards import FeatureShards, Layout
from draftsmith.train.teacher.sources import Source, Text

READER = "reader.json"
PARTS = 16
"""Portions that a window has room for, unless a step reads more than one."""
POLL = 0.05
"""Seconds between two looks at what the other side has done."""
PORTION = re.compile(r"(?P<run>[0-9a-f]{12})-(?P<epoch>-?\d+)-(?P<portion>\d+)\.parquet")


class Position(TypedDict):
    """What a training run says of itself: where it reads next."""

    run: str
    epoch: int
    portion: Count
    done: bool


class Portion(NamedTuple):
    """What is written and removed as one."""

    name: str
    texts: np.ndarray
    """The hashes of its texts, uint64."""
    most: int
    """Bytes that it takes at most."""
    max_length: int | None
    """Tokens of a text that are read; None for all."""


@dataclass(frozen=True)
class Order:
    """In which order a run reads texts, divided into portions of whole steps."""

    texts: np.ndarray
    """Their hashes, uint64."""
    ends: np.ndarray
    """Where each portion ends among them."""
    steps: np.ndarray
    """And among the steps of the epoch."""
    most: np.ndarray
    """Bytes that each portion takes at most."""
    max_length: int = 0
    """Tokens of a text that are read; 0 for all."""

    @classmethod
    def of(cls, data: TrainingData, rows: np.ndarray, rows_of_step: int, layout: Layout, most: int) -> "Order":
        """Return the order of some rows.

        Args:
            data: whose rows.
            rows: one behind the other, as they are read.
            rows_of_step: how many a step reads.
            layout: of their features.
            most: bytes of a portion; one step may take more.
        """
        members = data.samples(rows.tolist())
        counts = np.ones_like(rows) if data.starts is None else np.diff(data.starts, append=len(data.members))[rows]
        starts = np.arange(0, len(rows), rows_of_step)
        sizes = data.lengths[rows] * layout.position_bytes + counts * FeatureShards.sample_bytes
        of_steps = np.add.reduceat(sizes, starts)
        steps = list[int]()
        taken = 0
        for step, size in enumerate(of_steps.tolist()):
            if taken and taken + size > most:
                steps.append(step)
                taken = 0
            taken += size
        steps.append(len(of_steps))
        ends = counts.cumsum()[np.minimum(np.array(steps) * rows_of_step, len(rows)) - 1]
        of_portions = np.add.reduceat(of_steps, [0, *steps[:-1]])
        return cls(data.text_hashes[members], ends, np.array(steps), of_portions, data.max_length or 0)

    def portions(self, run: str, epoch: int) -> list[Portion]:
        """Return them, with their names."""
        starts = [0, *self.ends.tolist()]
        return [
            Portion(
                f"{run}-{epoch}-{at}.parquet",
                self.texts[starts[at] : end],
                int(self.most[at]),
                int(self.max_length) or None,
            )
            for at, end in enumerate(self.ends.tolist())
        ]

    def save(self, path: Path) -> None:
        """Write it."""
        with written_aside(path) as aside, aside.open("wb") as file:
            np.savez(file, **{each.name: getattr(self, each.name) for each in fields(self)})

    @classmethod
    def load(cls, path: Path) -> "Order":
        """Read one."""
        with np.load(path) as saved:
            return cls(**{each.name: saved[each.name] for each in fields(cls)})

    @cached_property
    def _sorted(self) -> np.ndarray:
        return self.texts.argsort(kind="stable")

    def portions_of(self, text: int) -> list[int]:
        """Return in which portions a text is, ascending."""
        ends = (np.searchsorted(self.texts, np.uint64(text), side, sorter=self._sorted) for side in ("left", "right"))
        return np.unique(np.searchsorted(self.ends, self._sorted[slice(*ends)], side="right")).tolist()  # type: ignore[no-any-return]


@lru_cache(maxsize=2)
def _portions(directory: Path, run: str, epoch: int) -> list[Portion]:
    """Return those of an epoch, once a run has said them."""
    return Order.load(directory / f"order-{run}-{epoch}.npz").portions(run, epoch)


@lru_cache(maxsize=PARTS)
def _rows_of(file: Path, layout: Layout) -> dict[int, int]:
    """Return the row of each text of a portion."""
    shard = read_shard(file, layout.columns, columns=["text"])
    if shard is None:
        raise InputError(f"{file}: expected features as draftsmith cache writes them, found a damaged file")
    return {int(text): row for row, text in enumerate(shard["text"].to_numpy().view(np.uint64))}


@dataclass
class WindowReader:
    """The side of a window that reads: a training run."""

    directory: Path
    layout: Layout
    window: int
    """Bytes."""
    orders: dict[int, Order] = field(default_factory=dict)
    """Of some epochs, by their numbers; −1 is what is looked at before the first step."""
    run: str = ""
    epoch: int = -1
    speaks: bool = False
    """Whether this process writes for all of them."""
    _make: Callable[[int], Order] | None = None
    _epochs: int = 0
    _steps: int = 1

    def look_at(self, texts: Sequence[int]) -> None:
        """Have some texts written before training begins."""
        hashes = np.array(texts, np.uint64)
        self.run, self.epoch, self.speaks = hashlib.sha256(hashes.tobytes()).hexdigest()[:12], -1, is_first()
        once = np.array([len(hashes)]), np.array([1]), np.array([self.window // 2])
        self.orders = {-1: Order(hashes, *once)}
        self._say(0)

    def follow(self, trainer: Any) -> None:
        """Have the texts of a trainer's steps written, in the order in which it reads them.

        Args:
            trainer: a `RecipeTrainer`, whose order is an `EpochSampler`.

        Raises:
            InputError: (once training begins) a window that has no room for two steps.
        """
        trainer.add_callback(_Follow(self, trainer))

    def begin(self, sampler: EpochSampler, data: TrainingData, batch: int, batches: int, epochs: int) -> None:
        """Know in which order epochs are read.

        Args:
            sampler: the order of an epoch's rows.
            data: the rows.
            batch: rows that all processes read at once.
            batches: of them in a step.
            epochs: how many there are.

        Raises:
            InputError: a window that has no room for two steps.
        """

        def make(epoch: int) -> Order:
            sampler.set_epoch(epoch)
            rows = np.array(list(sampler))
            # accelerate fills the last batch with the first rows
            rows = np.resize(rows, -(-len(rows) // batch) * batch)
            return Order.of(data, rows, batch * batches, self.layout, self.window // PARTS)

        first = make(0)
        most = int(first.most.max())
        if 2 * most > self.window:
            raise InputError(
                f"{self.directory}: expected a window with room for two steps of {most / 1e9:.3g} GB, found one of "
                f"{self.window / 1e9:.3g} GB; give draftsmith cache a larger --window"
            )
        self.run = hashlib.sha256(first.texts.tobytes() + first.ends.tobytes()).hexdigest()[:12]
        self.orders, self._make, self._epochs = {0: first}, make, epochs
        self._steps = int(first.steps[-1])

    def at(self, step: int) -> None:
        """Go to a step of training: what was read before it may be removed."""
        epoch, place = divmod(step, self._steps)
        if epoch >= self._epochs:
            return  # the end is still to come
        self.epoch = epoch
        for other in [other for other in self.orders if other < epoch]:
            del self.orders[other]
        for wanted in (epoch, epoch + 1):
            if wanted < self._epochs and wanted not in self.orders:
                assert self._make is not None
                self.orders[wanted] = self._make(wanted)
        self._say(int(np.searchsorted(self.orders[epoch].steps, place, side="right")))

    def end(self) -> None:
        """Say that nothing is read any more."""
        self._say(0, done=True)

    def find(self, text: int) -> tuple[Path, int]:
        """Return the portion of a text, and its row there; wait until it is written."""
        portions = self.orders[self.epoch].portions_of(text)
        if len(portions) > 1:  # read twice in an epoch
            read_now = read(Position, self.directory / READER)["portion"]
            portions = [portion for portion in portions if portion >= read_now]
        file = self.directory / f"{self.run}-{self.epoch}-{portions[0]}.parquet"
        if not file.exists():
            with phase(f"waiting for {file}, which draftsmith cache writes"):
                while not file.exists():
                    time.sleep(POLL)
        return file, _rows_of(file, self.layout)[int(text)]

    def _say(self, portion: int, done: bool = False) -> None:
        if not self.speaks:
            return
        names = {epoch: f"order-{self.run}-{epoch}.npz" for epoch in self.orders}
        for epoch, name in names.items():
            if not (self.directory / name).exists():
                self.orders[epoch].save(self.directory / name)
        position = Position(run=self.run, epoch=self.epoch, portion=portion, done=done)
        with written_aside(self.directory / READER) as aside:
            aside.write_text(json.dumps(position), encoding="utf-8")
        for old in self.directory.glob("order-*.npz"):
            if old.name not in names.values():
                old.unlink(missing_ok=True)


class _Follow(TrainerCallback):  # type: ignore[misc]
    """Tells a window where training is."""

    def __init__(self, reader: WindowReader, trainer: Any):
        self.reader, self.trainer = reader, trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.reader.speaks = state.is_world_process_zero
        loading: Any = args.accelerator_config
        batch = args.train_batch_size * (1 if loading.split_batches else args.world_size)
        self.reader.begin(
            self.trainer.epoch_order, self.trainer.data, batch, args.gradient_accumulation_steps, state.num_train_epochs
        )
        self.reader.at(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.reader.at(state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.reader.end()


@dataclass
class WindowWriter:
    """The side of a window that writes: `draftsmith cache --window`."""

    directory: Path
    shards: FeatureShards
    texts: Texts
    """All that a run may ask for."""
    window: int
    """Bytes, of all processes together."""
    processes: Processes
    samples: int = 0
    """Samples that were written."""
    positions: int = 0
    """Their positions."""
    size: int = 0
    """Bytes of what was written."""
    largest: int = 0
    """Bytes that lay there at a time, at most."""

    def serve(self, model: PreTrainedModel) -> None:
        """Write what a training run reads next, and remove what it has read, until it says that it reads no more.

        Args:
            model: the target.

        Raises:
            InputError: a run that reads other texts, or steps that the window has no room for.
            OSError: the disk is full, or cannot be written.
        """
        with phase(self.processes.title("feature window")) as bar:
            bar.advance(0, "waits for a training run")
            while (position := self._position()) is None or not position["done"]:
                if position is None or not self._step(position, model, bar):
                    time.sleep(POLL)
            self._remove(lambda run, epoch, portion: True)
            self.processes.gathered(None)
            if self.processes.first:
                for file in (*self.directory.glob("order-*.npz"), self.directory / READER):
                    file.unlink(missing_ok=True)

    def _step(self, position: Position, model: PreTrainedModel, bar: Phase) -> bool:
        """Remove what was read and write one portion; return False where there is nothing to write or no room."""
        now = position["epoch"], position["portion"]
        held = self._remove(lambda run, epoch, portion: run != position["run"] or (epoch, portion) < now)
        share = self.window // self.processes.count
        for portion in self._wanted(position):
            path = self.directory / portion.name
            if path.exists():
                continue
            if portion.most > share // 2:
                raise InputError(
                    f"window: expected room for two steps of {portion.most / 1e9:.3g} GB in each process, found "
                    f"{share / 1e9:.3g} GB"
                )
            if held + portion.most > share:
                return False
            self._write(path, portion, model)
            self.largest = max(self.largest, held + path.stat().st_size)
            bar.advance(0, f"{self.samples} samples written, {self.size / 1e9:.3g} GB")
            return True
        return False

    def _wanted(self, position: Position) -> Iterator[Portion]:
        """Give the portions that this process writes, in the order in which they are read."""
        for epoch in (position["epoch"], position["epoch"] + 1):
            try:
                portions = _portions(self.directory, position["run"], epoch)
            except FileNotFoundError:
                return
            for at in range(position["portion"] if epoch == position["epoch"] else 0, len(portions)):
                if at % self.processes.count == self.processes.rank:
                    yield portions[at]

    def _write(self, path: Path, portion: Portion, model: PreTrainedModel) -> None:
        found = np.searchsorted(self._hashes, portion.texts, sorter=self._order)
        numbers = self._order[np.minimum(found, len(self._order) - 1)]
        if (lacking := self._hashes[numbers] != portion.texts).any():
            raise InputError(
                f"completions: expected all that the training run reads, found none of {lacking.sum()} of its texts"
            )
        numbers = np.unique(numbers)
        names, marks = self.texts.ids(numbers), self._hashes[numbers].view(np.int64).tolist()
        read_texts: list[Text] = [
            (name, self.texts.read(number, portion.max_length)[0].tolist(), [])
            for name, number in zip(names, numbers.tolist(), strict=True)
        ]
        positions = sum(self.shards.positions(text) for text in read_texts)
        source = Source(self.directory, path.name, tuple(zip(names, marks, strict=True)), positions)
        self.shards.write(path, source, read_texts, model, lambda _: None)
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

    def _remove(self, gone: Callable[[str, int, int], bool]) -> int:
        """Remove portions of this process that are wanted no more, and return the bytes of those that stay."""
        held = 0
        for file in self.directory.glob("*.parquet"):
            name = PORTION.fullmatch(file.name)
            if name is None or int(name["portion"]) % self.processes.count != self.processes.rank:
                continue
            if gone(name["run"], int(name["epoch"]), int(name["portion"])):
                file.unlink(missing_ok=True)
            else:
                held += file.stat().st_size
        return held
