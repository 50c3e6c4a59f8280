"""A window of a feature cache: portions are written just before they are read and removed afterwards.

The features of 10⁹ tokens are 38 TB, too many to store. But a training run reads them in an order that is known in
advance. So two commands share a directory, and synchronise by files alone; they may run on different machines, and
either can be stopped and started again:

* the training run writes `order-RUN-E.npz`, the order of the texts in epoch E, divided into portions, and
  `reader.json`, the portion that it reads now;
* `draftsmith cache --window` writes `RUN-E-P.parquet`, the features of portion P, for as many portions in advance as
  the window has room for, and removes those that were read. They are shards like those of a whole cache.

RUN is a hash of the order: a resumed run reuses the portions that still exist.
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
from draftsmith.train.files import atomic_path
from draftsmith.train.job.processes import Processes, is_first
from draftsmith.train.teacher.feature_shards import FeatureShards, Layout
from draftsmith.train.teacher.sources import Source, Text

READER = "reader.json"
PARTS = 16
"""The portions that fit into a window, unless a step reads more than one."""
POLL = 0.05
"""The seconds between two looks at the other side's files."""
PORTION = re.compile(r"(?P<run>[0-9a-f]{12})-(?P<epoch>-?\d+)-(?P<portion>\d+)\.parquet")


class Position(TypedDict):
    """The content of `reader.json`: the portion that a training run reads now."""

    run: str
    epoch: int
    portion: Count
    done: bool


class Portion(NamedTuple):
    """A unit of writing and removing: texts by hash, uint64, cut to `max_length` tokens, of at most `most` bytes."""

    name: str
    texts: np.ndarray
    most: int
    max_length: int | None


@dataclass(frozen=True)
class Order:
    """The order in which a run reads the texts of an epoch, divided into portions of whole steps.

    `texts` are hashes, uint64. `ends` and `steps` are the ends of portions, counted in texts and in steps of the epoch;
    `most` bounds their bytes. Texts are cut to `max_length` tokens, unless that is 0.
    """

    texts: np.ndarray
    ends: np.ndarray
    steps: np.ndarray
    most: np.ndarray
    max_length: int = 0

    @classmethod
    def of(cls, data: TrainingData, rows: np.ndarray, rows_of_step: int, layout: Layout, most: int) -> "Order":
        """Return the order of rows of data in portions of at most `most` bytes, or of one larger step."""
        members = data.samples(rows.tolist())
        counts = np.ones_like(rows) if data.starts is None else np.diff(data.starts, append=len(data.members))[rows]
        starts = np.arange(0, len(rows), rows_of_step)
        sizes = data.lengths[rows] * layout.position_bytes + counts * FeatureShards.sample_bytes
        step_sizes = np.add.reduceat(sizes, starts)
        steps = list[int]()
        total = 0
        for step, size in enumerate(step_sizes.tolist()):
            if total and total + size > most:
                steps.append(step)
                total = 0
            total += size
        steps.append(len(step_sizes))
        ends = counts.cumsum()[np.minimum(np.array(steps) * rows_of_step, len(rows)) - 1]
        portion_sizes = np.add.reduceat(step_sizes, [0, *steps[:-1]])
        return cls(data.text_hashes[members], ends, np.array(steps), portion_sizes, data.max_length or 0)

    def portions(self, run: str, epoch: int) -> list[Portion]:
        """Return the portions, with the names of their files."""
        texts, max_length = np.split(self.texts, self.ends[:-1]), int(self.max_length) or None
        names = [f"{run}-{epoch}-{at}.parquet" for at in range(len(texts))]
        return [Portion(*part, max_length) for part in zip(names, texts, self.most.tolist(), strict=True)]

    def save(self, path: Path) -> None:
        """Write the order to a file."""
        with atomic_path(path) as aside, aside.open("wb") as file:
            np.savez(file, **{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: Path) -> "Order":
        """Read an order from a file."""
        with np.load(path) as saved:
            return cls(**{field.name: saved[field.name] for field in fields(cls)})

    @cached_property
    def _sorted(self) -> np.ndarray:
        return self.texts.argsort(kind="stable")

    def portions_of(self, text: int) -> list[int]:
        """Return the numbers of the portions that have a text, ascending."""
        ends = (np.searchsorted(self.texts, np.uint64(text), side, sorter=self._sorted) for side in ("left", "right"))
        return np.unique(np.searchsorted(self.ends, self._sorted[slice(*ends)], side="right")).tolist()  # type: ignore[no-any-return]


@lru_cache(maxsize=2)
def _portions(directory: Path, run: str, epoch: int) -> list[Portion]:
    """Return the portions of an epoch; FileNotFoundError until the run has written its order."""
    return Order.load(directory / f"order-{run}-{epoch}.npz").portions(run, epoch)


@lru_cache(maxsize=PARTS)
def _rows_of(file: Path, layout: Layout) -> dict[int, int]:
    """Return the row of each text in a portion's file."""
    shard = read_shard(file, layout.columns, columns=["text"])
    if shard is None:
        raise InputError(f"{file}: expected features as draftsmith cache writes them, found a damaged file")
    return {int(text): row for row, text in enumerate(shard["text"].to_numpy().view(np.uint64))}


@dataclass
class WindowReader:
    """The reading side of a window: a training run.

    `window` is in bytes. `orders` has those of the present and the next epoch by number; −1 is the text that is read
    before the first step. `speaks` is true in the process that writes files for all others.
    """

    directory: Path
    layout: Layout
    window: int
    orders: dict[int, Order] = field(default_factory=dict)
    run: str = ""
    epoch: int = -1
    speaks: bool = False
    _make: Callable[[int], Order] | None = None
    _epochs: int = 0
    _steps: int = 1

    def request_features(self, texts: Sequence[int]) -> None:
        """Request the features of texts that are read before training begins."""
        hashes = np.array(texts, np.uint64)
        self.run, self.epoch, self.speaks = hashlib.sha256(hashes.tobytes()).hexdigest()[:12], -1, is_first()
        one_portion = np.array([len(hashes)]), np.array([1]), np.array([self.window // 2])
        self.orders = {-1: Order(hashes, *one_portion)}
        self._say(0)

    def follow(self, trainer: Any) -> None:
        """Follow the steps of a `RecipeTrainer`, whose order is an `EpochSampler`, by a callback."""
        trainer.add_callback(_Follow(self, trainer))

    def begin(self, sampler: EpochSampler, data: TrainingData, batch: int, batches: int, epochs: int) -> None:
        """Set the order of the epochs: a step reads `batches` batches, each of `batch` rows over all processes.

        Raise InputError if the window has no room for two steps.
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
            window = f"{self.window / 1e9:.3g} GB; give draftsmith cache a larger --window"
            room = f"a window with room for two steps of {most / 1e9:.3g} GB"
            raise InputError(f"{self.directory}: expected {room}, found one of {window}")
        self.run = hashlib.sha256(first.texts.tobytes() + first.ends.tobytes()).hexdigest()[:12]
        self.orders, self._make, self._epochs = {0: first}, make, epochs
        self._steps = int(first.steps[-1])

    def at(self, step: int) -> None:
        """Move to a step of training, so that the portions before it may be removed."""
        epoch, index = divmod(step, self._steps)
        if epoch >= self._epochs:
            return  # after the last step: `end` follows
        self.epoch = epoch
        for other in [other for other in self.orders if other < epoch]:
            del self.orders[other]
        for number in (epoch, epoch + 1):
            if number < self._epochs and number not in self.orders:
                assert self._make is not None
                self.orders[number] = self._make(number)
        self._say(int(np.searchsorted(self.orders[epoch].steps, index, side="right")))

    def end(self) -> None:
        """Announce that nothing more is read."""
        self._say(0, done=True)

    def find(self, text: int) -> tuple[Path, int]:
        """Return the portion of a text and its row there; wait until it is written."""
        portions = self.orders[self.epoch].portions_of(text)
        if len(portions) > 1:  # the text is read twice in an epoch, and earlier portions may be gone
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
        with atomic_path(self.directory / READER) as aside:
            aside.write_text(json.dumps(position), encoding="utf-8")
        for old in self.directory.glob("order-*.npz"):
            if old.name not in names.values():
                old.unlink(missing_ok=True)


class _Follow(TrainerCallback):  # type: ignore[misc]
    """A callback that tells a window the step of training."""

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
    """The writing side of a window: `draftsmith cache --window`.

    `texts` are all that a run may request, and `window` is in bytes, over all processes. `samples`, `positions` and
    `size` (bytes) count what was written, and `largest` is the most that was on disk at a time.
    """

    directory: Path
    shards: FeatureShards
    texts: Texts
    window: int
    processes: Processes
    samples: int = 0
    positions: int = 0
    size: int = 0
    largest: int = 0

    def serve(self, model: PreTrainedModel) -> None:
        """Write the features of the target that a training run reads next, and remove old ones, until the run ends.

        Raise InputError if the run reads other texts, or steps that the window has no room for.
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
        """Remove the portions that were read and write one; return False if nothing is missing or there is no room."""
        now = position["epoch"], position["portion"]
        stored = self._remove(lambda run, epoch, portion: run != position["run"] or (epoch, portion) < now)
        share = self.window // self.processes.count
        for portion in self._wanted(position):
            path = self.directory / portion.name
            if path.exists():
                continue
            if portion.most > share // 2:  # the next portion must be written while this one is read
                needed, room = f"two steps of {portion.most / 1e9:.3g} GB in each process", f"{share / 1e9:.3g} GB"
                raise InputError(f"window: expected room for {needed}, found {room}")
            if stored + portion.most > share:
                return False
            self._write(path, portion, model)
            self.largest = max(self.largest, stored + path.stat().st_size)
            bar.advance(0, f"{self.samples} samples written, {self.size / 1e9:.3g} GB")
            return True
        return False

    def _wanted(self, position: Position) -> Iterator[Portion]:
        """Yield the next portions that this process writes, in reading order."""
        for epoch in (position["epoch"], position["epoch"] + 1):
            try:
                portions = _portions(self.directory, position["run"], epoch)
            except FileNotFoundError:
                return
            for at in range(position["portion"] if epoch == position["epoch"] else 0, len(portions)):
                if at % self.processes.count == self.processes.rank:
                    yield portions[at]

    def _write(self, path: Path, portion: Portion, model: PreTrainedModel) -> None:
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
        """Remove the portions of this process that are `gone`, and return the bytes of the others."""
        stored = 0
        for file in self.directory.glob("*.parquet"):
            name = PORTION.fullmatch(file.name)
            if name is None or int(name["portion"]) % self.processes.count != self.processes.rank:
                continue
            if gone(name["run"], int(name["epoch"]), int(name["portion"])):
                file.unlink(missing_ok=True)
            else:
                stored += file.stat().st_size
        return stored
