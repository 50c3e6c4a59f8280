"""Stages of a long command: each is an ordinary command of ours, and does not run again once it has ended."""

import gc
import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from typing_extensions import TypedDict

from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import Amount, read
from draftsmith.scripts import cli
from draftsmith.train.cli import FILE_ONLY, INTERRUPTED, TERMINATED, OutOfTime, Terminated
from draftsmith.train.files import remove
from draftsmith.train.provenance import write_json

NO_GO = 3
PASSED = (0, NO_GO)
"""Exit codes of a stage that ended: a NO-GO is a result."""
JUDGED_LATER: dict[str, Any] = {
    "heldout": [],
    "training.eval_strategy": "no",
    "training.eval_on_start": False,
    "training.save_strategy": "no",
    "training.load_best_model_at_end": False,
    "training.report_to": [],
    "training.logging_strategy": "no",
    "training.disable_tqdm": True,
}
"""Fields of a training run whose last state is judged by later stages."""


@contextmanager
def interrupt_after(seconds: float | None) -> Iterator[None]:
    """Raise OutOfTime in a block after some seconds, as a scheduler would; None never does.

    Signals reach the main thread only: in another thread nothing is interrupted.
    """
    rang = done = False

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal rang
        if not done:
            rang = True
            raise OutOfTime

    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
        done = True
    except (KeyboardInterrupt, InputError) as error:
        if rang:  # a command may turn OutOfTime into its own error
            raise OutOfTime from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class KeptStage(TypedDict):
    """The record of a stage: commands of all stages up to it, and the seconds of all tries."""

    commands: list[list[str]]
    seconds: Amount
    ended: bool


@dataclass
class Stages:
    """Stages that run one after the other, with a record of each in `folder`."""

    folder: Path
    _commands: list[list[str]] = field(default_factory=list, init=False)
    _mark: float = field(default_factory=lambda: time.perf_counter(), init=False)

    def lap(self) -> float:
        """Return the seconds since the last stage or lap ended, the time between stages included."""
        mark, self._mark = self._mark, time.perf_counter()
        return self._mark - mark

    def run(self, name: str, argv: list[str], most: float | None = None) -> float:
        """Run a command of ours, unless the same command has ended after the same earlier ones; return its seconds.

        Raises:
            InputError: it failed.
            OutOfTime: it took longer than `most` seconds, earlier tries included.
        """
        self._commands.append(argv)
        path, before = self.folder / f"{name}.json", 0.0
        if (stage := self._kept(name)) is not None:
            if stage["commands"] == self._commands:
                before = stage["seconds"]
                if stage["ended"]:
                    return before
            else:
                remove(path)  # the settings changed; the command itself refuses its old output
        if most is not None and before >= most:
            self._commands.pop()
            raise OutOfTime
        print(f"{name}: draftsmith {' '.join(argv)}", flush=True)
        _give_back()
        ended, commands = False, list(self._commands)
        try:
            with interrupt_after(None if most is None else most - before):
                code = cli.main(argv)
                if code in (INTERRUPTED, TERMINATED):  # it has printed what it kept
                    raise KeyboardInterrupt if code == INTERRUPTED else Terminated
            if code not in PASSED:
                raise InputError(f"{name}: expected the stage to end, found exit code {code}: see its line above")
            ended = True
        except OutOfTime:
            self._commands.pop()  # later stages do not build on it
            raise
        finally:
            seconds = before + self.lap()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, KeptStage(commands=commands, seconds=seconds, ended=ended))
        return seconds

    def changed(self, name: str, argv: list[str]) -> bool:
        """Return whether a stage was begun with another command than this."""
        stage = self._kept(name)
        return stage is not None and stage["commands"][-1] != argv

    def unfinished(self, name: str) -> float:
        """Return the seconds of a stage that was begun and has not ended; 0 otherwise."""
        stage = self._kept(name)
        return 0.0 if stage is None or stage["ended"] else stage["seconds"]

    def _kept(self, name: str) -> KeptStage | None:
        path = self.folder / f"{name}.json"
        return read(KeptStage, path) if path.is_file() else None


def _give_back() -> None:
    """Free the GPU memory that earlier stages or replays hold: a stage may be other processes."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def flags_of(fields: Mapping[str, Any]) -> list[str]:
    """Return a command's fields as its flags; those that have none as a text of `--config`."""
    file = {name: value for name, value in fields.items() if name in FILE_ONLY}
    flags = [
        f"--{name}={value if isinstance(value, str | Path) else json.dumps(value)}"
        for name, value in fields.items()
        if name not in file
    ]
    return [*([f"--config={json.dumps(file)}"] if file else []), *flags]


def nest(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted fields as nested ones, as in YAML."""
    fields_by_group: dict[str, Any] = {}
    for key, value in fields.items():
        group, dot, name = key.partition(".")
        if dot:
            fields_by_group.setdefault(group, {})[name] = value
        else:
            fields_by_group[key] = value
    return fields_by_group
