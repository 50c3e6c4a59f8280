"""A sweep of calls, each done once: commands of ours and functions, whose results and seconds are kept in files."""

import gc
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from typing_extensions import TypedDict

from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import Amount, parse, read
from draftsmith.scripts import cli
from draftsmith.train.cli import INTERRUPTED, TERMINATED, Terminated
from draftsmith.train.provenance import as_json, write_json

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


class KeptStage(TypedDict):
    """The record of a stage: what all stages up to it were called with, its seconds and its result."""

    calls: list[Any]
    seconds: Amount
    result: Any


@dataclass
class Stages:
    """Stages that run one after the other, with a record of each in `folder`."""

    folder: Path
    seconds: dict[str, float] = field(default_factory=dict)  # by stage, when it ran
    _calls: list[Any] = field(default_factory=list, init=False)

    @property
    def spent(self) -> float:
        """The seconds of all stages so far."""
        return sum(self.seconds.values())

    def call(self, name: str, inputs: Any, function: Callable[[], Any], kind: Any = Any) -> Any:
        """Return a function's result as JSON of some kind; one that was kept if all stages so far had these inputs."""
        self._calls.append([name, as_json(inputs)])
        path = self.folder / f"{name}.json"
        stage = read(KeptStage, path) if path.is_file() else None
        if stage is None or stage["calls"] != self._calls:
            gc.collect()  # earlier stages hold memory of the GPU, and this one may be other processes
            torch.cuda.empty_cache()
            begin, calls = time.perf_counter(), list(self._calls)
            result = as_json(function())
            stage = KeptStage(calls=calls, seconds=time.perf_counter() - begin, result=result)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, stage)
        self.seconds[name] = stage["seconds"]
        return parse(kind, json.dumps(stage["result"]), str(path))

    def run(self, name: str, argv: list[str], fresh: Path | None = None) -> None:
        """Run a command of ours, after removing the directory `fresh`; raise InputError if it fails."""

        def command() -> None:
            print(f"{name}: draftsmith {' '.join(argv)}", flush=True)
            if fresh is not None:
                shutil.rmtree(fresh, ignore_errors=True)
            code = cli.main(argv)
            if code in (INTERRUPTED, TERMINATED):  # it has printed what it kept
                raise KeyboardInterrupt if code == INTERRUPTED else Terminated
            if code not in PASSED:
                raise InputError(f"{name}: expected the stage to end, found exit code {code}: see its line above")

        self.call(name, argv, command)
