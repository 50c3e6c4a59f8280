"""The first run on a GPU: the ten commands of `docs/gpu-first-run.md` in turn, and a file of their results.

    python -m draftsmith.scripts.bench.gpu

They use the embedded models, none of which needs more than a gigabyte. The page says what each command looks at, and
what its failure means. Start it in a clone.
"""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftsmith.decode.errors import at_least, at_most
from draftsmith.scripts.bench.common import BenchmarkConfig
from draftsmith.train.cli import parse_config, run
from draftsmith.train.models import default_device
from draftsmith.train.provenance import environment, write_json

LAST_LINES = 30
SECONDS = 1800
"""That a command may take: ten times what the longest takes on two cores without a GPU."""


@dataclass(frozen=True)
class Command:
    """One of the ten."""

    line: str
    """As the page has it."""
    prints: tuple[str, ...]
    """Regular expressions of what its output must have."""
    leaves: tuple[str, ...] = ()
    """Files that it must write."""


PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu-first-run.md"
PRINTS = {
    "doctor": (r"memory: .*free \(cuda", r"0 ✗"),
    "quickstart": (r"done in \d+ s",),
    "measure": (r"report:",),
    "profile": (r"trace, for ui\.perfetto\.dev",),
}
"""By command; all others train, and print losses."""
LOSS = r"'?loss'?: '?\d"
SETTINGS = r"settings: .* is the bound"
LEAVES = {"measure": "report.html", "profile": "trace.json"}
"""In the output directory; what trains leaves a config.json."""


def command_of(line: str) -> Command:
    """Return a command of the page, with what it must print and leave."""
    words = shlex.split(line)
    name, flags = words[1], dict(pairwise(words))
    prints = PRINTS.get(name, (LOSS,))
    if name == "measure" and "--lossless_tokens" not in flags:  # a measurement of speed
        prints += (SETTINGS,)
    directory = flags.get("--training.output_dir") or flags.get("--output")
    leaves = (f"{directory}/{LEAVES.get(name, 'config.json')}",) if directory else ()
    return Command(line, prints, ("runs/quickstart/report.html",) if name == "quickstart" else leaves)


def commands_of(page: Path) -> tuple[Command, ...]:
    """Return the commands of a page, in order; a line may go on behind a backslash."""
    text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
    return tuple(command_of(line) for line in re.findall(r"^draftsmith .*$", text, re.MULTILINE))


COMMANDS = commands_of(PAGE)


@dataclass
class BenchGpuConfig(BenchmarkConfig):
    """Run the ten commands of the first run on a GPU."""

    numbers: list[int] = field(default_factory=lambda: list(range(1, len(COMMANDS) + 1)))
    """Which of the ten to run; later ones need what earlier ones left."""
    output: str | None = "runs/gpu/first-run.json"
    """The file of results, written after each command."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for number in self.numbers:
            (at_least(1) & at_most(len(COMMANDS))).check("numbers", number)


def outcome_of(command: Command) -> dict[str, Any]:
    """Run a command to its end, and return its outcome."""
    program, *arguments = shlex.split(command.line)
    start = sys.executable if program == "python" else str(Path(sys.executable).with_name(program))
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            [start, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS
        )
        text, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        text, code = (late.output or b"").decode(errors="replace"), None
    except OSError as error:
        text, code = str(error), None
    missing = [pattern for pattern in command.prints if not re.search(pattern, text)]
    missing += [path for path in command.leaves if not Path(path).is_file()]
    return {
        "command": command.line,
        "passed": code == 0 and not missing,
        "exit_code": code,
        "seconds": round(time.perf_counter() - begin, 1),
        "missing": missing,
        "last_lines": text.splitlines()[-LAST_LINES:],
    }


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the commands, print a line for each, and write the file; 1 if one failed."""
    config = parse_config(BenchGpuConfig, argv, prog="python -m draftsmith.scripts.bench.gpu")
    console, path = Console(highlight=False, soft_wrap=True), config.figures_path()
    results: dict[str, Any] = {"environment": machine(), "commands": {}}
    if results["environment"]["gpu"] is None:
        console.print("no CUDA GPU was found: this is a run of the commands, and no first run on a GPU")
    for number in config.numbers:
        outcome = outcome_of(COMMANDS[number - 1])
        results["commands"][str(number)] = outcome
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, results)
        verdict = "passed" if outcome["passed"] else f"FAILED, exit code {outcome['exit_code']}"
        lacks = f"; without {', '.join(outcome['missing'])}" if outcome["missing"] else ""
        console.print(f"{number:2} {verdict} in {outcome['seconds']:.0f} s: {outcome['command']}{lacks}", markup=False)
    return int(not all(each["passed"] for each in results["commands"].values()))


if __name__ == "__main__":
    sys.exit(run(main))
