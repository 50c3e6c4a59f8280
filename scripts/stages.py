"""Stages of a long command: each is an ordinary command of ours, and is not run again once it has ended."""

import gc
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import Amount, read
from draftsmith.scripts import cli
from draftsmith.train.cli import INTERRUPTED, TERMINATED, Terminated
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
"""Fields of a training run whose last state is judged, by what comes behind it."""


class KeptStage(TypedDict):
    """What is kept of a stage."""

    commands: list[list[str]]
    """Its own command, behind those of all stages before it."""
    seconds: Amount
    """Of all tries."""
    ended: bool


@dataclass
class Stages:
    """Runs stages one behind the other, and keeps which have ended.

    Args:
        folder: where.
    """

    folder: Path
    _commands: list[list[str]] = field(default_factory=list, init=False)

    def run(self, name: str, argv: list[str]) -> float:
        """Run a command of ours, unless this very one has ended behind the very same ones; return its seconds.

        Raises:
            InputError: it failed.
        """
        self._commands.append(argv)
        kept, before = self.folder / f"{name}.json", 0.0
        if kept.is_file():
            stage = read(KeptStage, kept)
            if stage["commands"] == self._commands:
                before = stage["seconds"]
                if stage["ended"]:
                    return before
            else:
                remove(kept)  # of other settings; what it wrote is the command's own to refuse
        print(f"{name}: draftsmith {' '.join(argv)}", flush=True)
        _give_back()
        begin, ended = time.perf_counter(), False
        try:
            code = cli.main(argv)
            if code in (INTERRUPTED, TERMINATED):  # what it kept it has said
                raise KeyboardInterrupt if code == INTERRUPTED else Terminated
            if code not in PASSED:
                raise InputError(f"{name}: expected the stage to end, found exit code {code}: see its line above")
            ended = True
        finally:
            seconds = before + time.perf_counter() - begin
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_json(kept, KeptStage(commands=self._commands, seconds=seconds, ended=ended))
        return seconds

    def changed(self, name: str, argv: list[str]) -> bool:
        """Return whether a stage was begun with another command than this."""
        kept = self.folder / f"{name}.json"
        return kept.is_file() and read(KeptStage, kept)["commands"][-1] != argv


def _give_back() -> None:
    """Give back the GPU memory that earlier stages, or replays between them, hold: a stage may be other processes."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def flags_of(fields: dict[str, Any]) -> list[str]:
    """Return fields of a config as flags of its command."""
    return [
        f"--{name}={value if isinstance(value, str | Path) else json.dumps(value)}" for name, value in fields.items()
    ]


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted fields as YAML has them."""
    found: dict[str, Any] = {}
    for key, value in fields.items():
        group, dot, name = key.partition(".")
        if dot:
            found.setdefault(group, {})[name] = value
        else:
            found[key] = value
    return found
