"""A window of a feature cache: portions are written just before they are read and removed afterwards.

The features of 10⁹ tokens are 38 TB, too many to store. But a training run reads them in an order that is known in
advance. So two commands share a directory, and synchronise by files alone; they may run on different machines, and
either can be stopped and started again:

* the training run writes `order-RUN-E.npz`, the order of the texts in epoch E, divided into portions, and
  `reader.json`, the portion that it reads now;
* `draftsmith cache --window` writes `RUN-E-P.parquet`, the features of portion P, for as many portions in advance as
  the window has room for, and removes those that were read. They are shards like those of a whole cache.

RUN is a hash of the order and of what the features depend on: a resumed run reuses the portions that still exist.
Held-out texts have a RUN of their own, which stays until the end, as every evaluation reads them.

Where servers give the features, each process of a training run has a window of its own, in a folder of its own, and a
filler in place of `draftsmith cache` (`served_window.py`).
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import TypedDict

from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase
from draftsmith.decode.validation import Count, read
from draftsmith.train.data.examples import TrainingData
from draftsmith.train.data.sampler import EpochSampler
from draftsmith.train.data.shards import read_shard
from draftsmith.train.files import atomic_path
from draftsmith.train.job.processes import is_first
from draftsmith.train.teacher.feature_shards import FeatureShards, Layout

READER = "reader.json"
PARTS = 16
"""The portions that fit into a window, unless a step reads more than one."""
RAMP = 6
"""The portions of an epoch that double in size, up to a sixteenth of the window."""
POLL = 0.05
"""The seconds between two looks at the other side's files."""
PORTION = re.compile(r"(?P<run>[0-9a-f]{12})-(?P<epoch>-?\d+)-(?P<portion>\d+)\.parquet")


class Position(TypedDict):
    """The content of `reader.json`: the portion that a training run reads now, and the name of its held-out texts."""

    run: str
    epoch: int
    portion: Count
    done: bool
    heldout: str


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
            # The first portions of an epoch are small, so that training begins soon.
            if total and total + size > most >> max(RAMP - len(steps), 0):
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
    before the first step. `speaks` is true in the process that writes files for all others; where each process has a
    window of its `own`, it is true in all. `teacher` tells apart what gives the features.
    """

    directory: Path
    layout: Layout
    window: int
    own: bool = False
    teacher: str = ""
    orders: dict[int, Order] = field(default_factory=dict)
    run: str = ""
    epoch: int = -1
    speaks: bool = False
    heldout: Order | None = None
    _make: Callable[[int], Order] | None = None
    _epochs: int = 0
    _steps: int = 1

    def request_features(self, texts: Sequence[int], lengths: Sequence[int]) -> None:
        """Request the features of the first tokens of texts, as many as `lengths`, which are read before training."""
        count, size = len(texts), sum(lengths) * self.layout.position_bytes + len(texts) * FeatureShards.sample_bytes
        one_portion = np.array([count]), np.array([1]), np.array([min(size, self.window // 2)])
        order = Order(np.array(texts, np.uint64), *one_portion, max_length=max(lengths, default=0))
        self.run, self.epoch, self.speaks = self._name_of(order), -1, self.own or is_first()
        self.orders = {-1: order}
        self._say(0)

    def follow(self, trainer: Any, cached: np.ndarray) -> None:
        """Follow the steps of a `RecipeTrainer`, whose order is an `EpochSampler`, by a callback.

        Whole caches have the texts `cached`, by hash. Raise InputError where texts are not read in the order of steps,
        or by processes that never hear of the next epoch.
        """
        for name in ("ignore_data_skip", "dataloader_persistent_workers"):
            if getattr(trainer.args, name):
                raise InputError(f"training.{name}: expected false with a window of states, found true")
        trainer.add_callback(_Follow(self, trainer, cached))

    def begin(
        self,
        sampler: EpochSampler,
        data: TrainingData,
        batch: int,
        batches: int,
        epochs: int,
        heldout: tuple[TrainingData, np.ndarray] | None = None,
        part: tuple[int, int] = (0, 1),
        drop_last: bool = False,
    ) -> None:
        """Set the order of the epochs: a step reads `batches` batches, each of `batch` rows over all processes.

        `heldout` are the rows that each evaluation reads. `part` is the number of this window's process and their
        count, where each has a window of its own; `drop_last` leaves out an incomplete batch. Raise InputError if the
        window has no room for two steps.
        """
        rank, world = part

        def make(epoch: int) -> Order:
            sampler.set_epoch(epoch)
            rows = np.array(list(sampler))
            # accelerate fills the last batch with the first rows, or drops it, and deals batches to processes in turn
            count = len(rows) // batch if drop_last else -(-len(rows) // batch)
            rows = np.resize(rows, count * batch).reshape(-1, world, batch // world)[:, rank].ravel()
            return Order.of(data, rows, batch // world * batches, self.layout, self.window // PARTS)

        first, kept = make(0), 0
        if heldout is not None:
            held, rows = heldout
            self.heldout = Order.of(held, rows, 1, self.layout, self.window // PARTS)
            kept = int(self.heldout.most.sum())
        most = int(first.most.max())
        if 2 * most + kept > self.window:
            window = f"{self.window / 1e9:.3g} GB; give a larger --{'teacher_' * self.own}window"
            room = f"a window with room for two steps of {most / 1e9:.3g} GB"
            room += f" and {kept / 1e9:.3g} GB of held-out texts" if kept else ""
            raise InputError(f"{self.directory}: expected {room}, found one of {window}")
        self.run = self._name_of(first)
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
        if not (written := [file for file in self._files_of(text) if file.exists()]):
            what = f"{self._files_of(text)[0]}, which {'servers fill' if self.own else 'draftsmith cache writes'}"
            with phase(f"waiting for {what}"):
                while not (written := [file for file in self._files_of(text) if file.exists()]):
                    self.require_written()
                    time.sleep(POLL)
        return written[0], _rows_of(written[0], self.layout)[int(text)]

    def _files_of(self, text: int) -> list[Path]:
        """Return the files that have a text now or later; one of an earlier portion may go while it is looked for."""
        if self.heldout is not None and (portions := self.heldout.portions_of(text)):
            return [self.directory / f"{self._heldout_name}-0-{portions[0]}.parquet"]
        portions = self.orders[self.epoch].portions_of(text)
        if len(portions) > 1:  # the text is read twice in an epoch, and earlier portions may be gone
            read_now = read(Position, self.directory / READER)["portion"]
            portions = [portion for portion in portions if portion >= read_now]
        return [self.directory / f"{self.run}-{self.epoch}-{portion}.parquet" for portion in portions]

    def require_written(self) -> None:
        """Raise an InputError if nothing will be written; `draftsmith cache` may be started at any time."""

    def waited(self, share: float) -> None:
        """Note the share of its time that training waited for batches since the last log."""

    @property
    def _heldout_name(self) -> str:
        return "" if self.heldout is None else self._name_of(self.heldout)

    def _name_of(self, order: Order) -> str:
        """Return the name of a run, a hash of what it reads and of what that is computed by."""
        digest = hashlib.sha256(repr((self.layout, self.teacher, order.max_length)).encode())
        digest.update(order.texts.tobytes() + order.ends.tobytes())
        return digest.hexdigest()[:12]

    def _say(self, portion: int, done: bool = False) -> None:
        if not self.speaks:
            return
        orders = {f"order-{self.run}-{epoch}.npz": order for epoch, order in self.orders.items()}
        if self.heldout is not None:
            orders[f"order-{self._heldout_name}-0.npz"] = self.heldout
        for name, order in orders.items():
            if not (self.directory / name).exists():
                order.save(self.directory / name)
        heldout = self._heldout_name
        position = Position(run=self.run, epoch=self.epoch, portion=portion, done=done, heldout=heldout)
        with atomic_path(self.directory / READER) as aside:
            aside.write_text(json.dumps(position), encoding="utf-8")
        for old in self.directory.glob("order-*.npz"):
            if old.name not in orders:
                old.unlink(missing_ok=True)


class _Follow(TrainerCallback):  # type: ignore[misc]
    """A callback that tells a window the step of training."""

    def __init__(self, reader: WindowReader, trainer: Any, cached: np.ndarray):
        self.reader, self.trainer, self.cached, self.over = reader, trainer, cached, False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        own, trainer = self.reader.own, self.trainer
        self.reader.speaks = own or state.is_world_process_zero
        loading: Any = args.accelerator_config
        batch = args.train_batch_size * (1 if loading.split_batches else args.world_size)
        part = (args.process_index, args.world_size) if own else (0, 1)
        steps = args.gradient_accumulation_steps, state.num_train_epochs
        dropped = args.dataloader_drop_last
        self.reader.begin(trainer.epoch_order, trainer.data, batch, *steps, self._heldout(), part, dropped)
        self.reader.at(state.global_step)

    def _heldout(self) -> tuple[TrainingData, np.ndarray] | None:
        """Return the held-out data, and the rows of it that evaluations read through this window."""
        heldout: TrainingData | None = self.trainer.eval_dataset
        if heldout is None:
            return None
        rows = np.arange(len(heldout))
        if self.reader.own:
            batches: Any = self.trainer.get_eval_dataloader().batch_sampler  # of this process
            rows = np.unique([row for batch in batches for row in batch])
        rows = rows[~np.isin(heldout.text_hashes[heldout.members[rows]], self.cached)]
        return (heldout, rows) if len(rows) else None

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        if logs and "time_data" in logs:
            self.reader.waited(logs["time_data"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.reader.at(state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.over = True
        if self.reader.heldout is None or self.trainer.kept_step.score is not None:
            self.reader.end()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.over:  # a run without evaluations has one after its last step
            self.reader.end()
