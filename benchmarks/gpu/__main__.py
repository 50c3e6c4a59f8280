"""`python -m benchmarks.gpu --minutes 9`: the first run on a GPU, and a file of its results."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.gpu import BenchGpuConfig
from benchmarks.gpu.cases import cases, one_of_each_first
from benchmarks.gpu.worker import FAILED, PASSED, REFUSED, RUNNING, WAITING
from draftsmith.decode.errors import InputError
from draftsmith.train.cli import parse_config, run
from draftsmith.train.job.processes import end_session, terminable
from draftsmith.train.models import default_device
from draftsmith.train.provenance import environment, write_json

POLL = 0.5
"""Seconds between two looks at the file."""
PATIENCE = 10
"""How many times as long a case may take on a CPU."""
OVER = "the time was over"
WORKER = (sys.executable, "-m", "benchmarks.gpu.worker")


def machine() -> dict[str, Any]:
    """Return versions, and the GPU's name, memory and generation; None where there is none."""
    device = default_device()
    found: dict[str, Any] = environment(device) | {"cuda": torch.version.cuda, "gpu": None}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "count": torch.cuda.device_count(),
        }
    return found


class Run:
    """The cases of a run, and the processes that work on them, one at a time."""

    def __init__(self, file: Path, deadline: float, console: Console, worker: Sequence[str] = WORKER):
        self._file, self._deadline, self._console = file, deadline, console
        self._command = [*worker, str(file)]
        slower = 1 if default_device().type == "cuda" else PATIENCE
        self._limits = {name: slower * case.seconds for name, case in cases().items()}
        self._said: set[str] = set()

    def results(self) -> dict[str, Any]:
        """Return what the file says."""
        return json.loads(self._file.read_text(encoding="utf-8"))  # type: ignore[no-any-return]

    def work(self) -> None:
        """Start processes until no case waits, or the time is over."""
        log = self._file.with_suffix(".log")
        with log.open("w", encoding="utf-8") as lines:
            while time.time() < self._deadline and self._in_state(WAITING):
                quiet = os.environ | {"PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
                worker = subprocess.Popen(
                    self._command, stdout=lines, stderr=subprocess.STDOUT, env=quiet, start_new_session=True
                )
                try:
                    ended = self._watch(worker)
                finally:
                    end_session(worker)
                self._settle(ended or f"its process ended with exit code {worker.returncode}: see {log}")
                if ended is None and worker.returncode and not self._said:
                    raise InputError(f"{log}: expected a process that runs the cases, found one that did not start")

    def _watch(self, worker: "subprocess.Popen[bytes]") -> str | None:
        """Wait for a process, and return why it is to be ended: its case takes too long, or the time is over."""
        while worker.poll() is None:
            self._say()
            why = OVER if time.time() > self._deadline else None
            for name, entry in self._in_state(RUNNING).items():
                if time.time() - entry["began"] > self._limits[name]:
                    why = f"it took longer than {self._limits[name]:.0f} s"
            if why is not None:
                return why
            time.sleep(POLL)
        return None

    def _settle(self, why: str) -> None:
        """Note why the case that was running has no result; one that the time cut waits again."""
        results = self.results()
        for name in self._in_state(RUNNING):
            results["cases"][name] = {"state": WAITING} if why == OVER else {"state": FAILED, "error": [why]}
        write_json(self._file, results)
        self._say()

    def _in_state(self, state: str) -> dict[str, Any]:
        return {name: entry for name, entry in self.results()["cases"].items() if entry["state"] == state}

    def _say(self) -> None:
        """Print the cases that are new in the file."""
        for name, entry in self.results()["cases"].items():
            if name not in self._said and entry["state"] in (PASSED, FAILED, REFUSED):
                self._said.add(name)
                error = f": {entry['error'][-1]}" if entry.get("error") else ""
                took = f" in {entry['seconds']:.0f} s" if "seconds" in entry else ""
                self._console.print(f"{entry['state']}{took}: {name}{error}", markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, print a line for each, and write the file; 1 if one failed."""
    deadline = time.time()
    config = parse_config(BenchGpuConfig, argv, prog="python -m benchmarks.gpu")
    deadline += 60 * config.minutes
    console, file = Console(highlight=False, soft_wrap=True), Path(str(config.output))
    on_gpu = machine()["gpu"] is not None
    ordered = cases() if on_gpu else one_of_each_first()
    names = [name for name in ordered if not config.only or name.startswith(tuple(config.only))]
    if not names:
        raise InputError(f"only: expected beginnings of {', '.join(cases())}, found {', '.join(config.only)}")
    results = {"environment": machine(), "cases": {name: {"state": WAITING} for name in names}}
    if not on_gpu:
        console.print("no CUDA GPU was found: tiny models, one case of each stage first, and figures are null")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, results)
    work = Run(file, deadline, console)
    with terminable():
        work.work()
    states = Counter(entry["state"] for entry in work.results()["cases"].values())
    counts = ", ".join(f"{states[state]} {state}" for state in (PASSED, FAILED, REFUSED, WAITING))
    console.print(f"{counts}: {file}")
    return int(states[FAILED] > 0)


if __name__ == "__main__":
    sys.exit(run(main))
