"""The first run on a GPU: ten commands in turn, what each must print and leave, and a file of what came of them.

    python -m draftsmith.scripts.bench.gpu

They take the embedded models, of which none needs more than a gigabyte. `docs/gpu-first-run.md` says what each command
looks at, and what its failure means. To be started in a clone.
"""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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


TRAINING = "--training.bf16 true"
PACKED = "--packing true --max_length 512"
FLEX = "--attn_implementation flex_attention"
MEASURED = "--prompts runs/quickstart/prompts/measured.jsonl --draft_length 4 --max_new_tokens 48 --limit 16"
DRAFTERS = "--drafter runs/gpu/draft --drafter runs/gpu/hydra --drafter runs/gpu/eagle --drafter prompt_lookup"
LOSS = r"'?loss'?: '?\d"
COMMANDS = (
    Command("draftsmith doctor --config configs/doctor/tiny.yaml --dtype bfloat16", (r"memory: .*free \(cuda", r"0 ✗")),
    Command("draftsmith quickstart", (r"done in \d+ s",), ("runs/quickstart/report.html",)),
    Command(
        f"draftsmith distill --config configs/distill/tiny.yaml {TRAINING} --training.output_dir runs/gpu/draft",
        (LOSS,),
        ("runs/gpu/draft/model.safetensors",),
    ),
    Command(
        f"draftsmith distill --config configs/distill/tiny-parallel.yaml {TRAINING} {PACKED} {FLEX}"
        " --training.output_dir runs/gpu/parallel",
        (LOSS,),
        ("runs/gpu/parallel/model.safetensors",),
    ),
    Command(
        f"draftsmith medusa --config configs/medusa/tiny.yaml --hydra true {TRAINING} {PACKED}"
        " --training.output_dir runs/gpu/hydra",
        (LOSS,),
        ("runs/gpu/hydra/config.json",),
    ),
    Command(
        f"draftsmith eagle --config configs/eagle/tiny.yaml {TRAINING} {PACKED} --training.output_dir runs/gpu/eagle",
        (LOSS,),
        ("runs/gpu/eagle/config.json",),
    ),
    Command(
        f"draftsmith measure --target assets/tiny-target {DRAFTERS} --drafter runs/gpu/parallel {MEASURED}"
        " --dtype float32 --temperature 0,1 --lossless_tokens 20000 --output runs/gpu/lossless",
        (r"report:",),
        ("runs/gpu/lossless/report.json",),
    ),
    Command(
        f"draftsmith measure --target assets/tiny-target {DRAFTERS} {MEASURED} --dtype float32 --temperature 0"
        " --output runs/gpu/float32",
        (r"settings: .* is the bound",),
        ("runs/gpu/float32/report.html",),
    ),
    Command(
        f"draftsmith measure --target assets/tiny-target {DRAFTERS} {MEASURED} --dtype bfloat16 --temperature 0,1"
        " --batch_size 1,8 --output runs/gpu/bfloat16",
        (r"settings: .* is the bound",),
        ("runs/gpu/bfloat16/report.html",),
    ),
    Command(
        "draftsmith profile --config configs/profile/tiny.yaml --drafter runs/gpu/draft --dtype bfloat16"
        " --output runs/gpu/profile",
        (r"trace, for ui\.perfetto\.dev",),
        ("runs/gpu/profile/trace.json",),
    ),
)


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
    """Run a command to its end, and return what came of it."""
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
    """Return what ran: versions, and the GPU's name, memory and generation; None where there is none."""
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
        told = "passed" if outcome["passed"] else f"FAILED, exit code {outcome['exit_code']}"
        lacks = f"; without {', '.join(outcome['missing'])}" if outcome["missing"] else ""
        console.print(f"{number:2} {told} in {outcome['seconds']:.0f} s: {outcome['command']}{lacks}", markup=False)
    return int(not all(each["passed"] for each in results["commands"].values()))


if __name__ == "__main__":
    sys.exit(run(main))
