"""Provenance of a result: versions, machine, commit, config."""

import dataclasses
import json
import os
import platform
import subprocess
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from draftsmith.decode.validation import parse_json
from draftsmith.train.files import write_atomically

RUN_RECORD = "draftsmith.json"


def environment(device: torch.device | None, dtype: str | None = None) -> dict[str, Any]:
    """Return the `environment` object of reports and run records; unknown values are None, as without a device."""
    name = torch.cuda.get_device_name(device) if device and device.type == "cuda" else platform.processor()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device and f"{device.type}: {name or platform.machine()}",
        "cores": os.cpu_count(),
        "dtype": dtype,
        "threads": device and torch.get_num_threads(),
        "git_sha": git_sha(),
    }


@cache
def git_sha() -> str | None:
    """Return the commit of this source tree, with `+` if it has changes; None outside a checkout.

    That of the first call, which is nearer to what this process runs.
    """
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    describe = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run(describe, capture_output=True, encoding="utf-8", check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_atomically(path, json.dumps(value, indent=2, default=_plain) + "\n")


def write_run_record(directory: Path, config: Any, device: torch.device, kept: Any) -> None:
    """Write the record of a run into its directory: config, environment, and which step was kept."""
    write_json(directory / RUN_RECORD, {"config": config, "environment": environment(device), "kept": kept})


def recorded_config(directory: Path) -> Any:
    """Return the config of a finished run as JSON, or None where there is no record."""
    try:
        record = parse_json((directory / RUN_RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record.get("config") if isinstance(record, dict) else None


def as_json(value: Any) -> Any:
    """Return a value as it reads after a round trip through JSON."""
    return json.loads(json.dumps(value, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, transformers.TrainingArguments):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    return str(value)
