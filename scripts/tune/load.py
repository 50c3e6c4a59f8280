"""`draftsmith tune --reports`: the draft length for each load, from measurements of the server itself.

`measure --server` has measured the server at several draft lengths and numbers of concurrent requests, each next to a
server without drafts. The table takes the fastest draft length for each number; nothing is predicted. A draft length of
0 counts as plain decoding, unless it was measured too.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import parse_json
from draftsmith.scripts.engines.draft_lengths import SCHEMA, chosen_lengths, entry, ranges
from draftsmith.scripts.tune.config import LoadConfig
from draftsmith.train.cli import parse_config
from draftsmith.train.files import require_writable
from draftsmith.train.provenance import write_json

FILE = "draft_lengths.json"
Speeds = dict[int, dict[int, dict[float, float]]]
"""Concurrent requests → γ → temperature → speed-up over the server without drafts."""


def tune_load(config: LoadConfig) -> dict[int, dict[int, float]]:
    """Write draft_lengths.json; return concurrent requests → γ → speed-up, the harmonic mean over temperatures."""
    output = require_writable(config.output, FILE)
    speeds, temperatures = Speeds(), set[float]()
    for path in map(Path, config.reports):
        file = path / "report.json" if path.is_dir() else path
        if not file.is_file():
            raise InputError(f"reports: expected a report of `measure --server` at {path}, found none")
        for run in _runs(file):
            speedup = run["speedup"]["value"]
            if speedup is None:
                raise InputError(f"reports: expected speed-ups over a baseline server in {file}, found none")
            by_length = speeds.setdefault(run["batch_size"], {})
            by_length.setdefault(run["draft_length"], {})[run["temperature"]] = speedup
            temperatures.add(run["temperature"])
    lengths = {length for by_length in speeds.values() for length in by_length}
    for requests, by_length in speeds.items():
        for length in sorted(lengths):
            if by_length.get(length, {}).keys() != temperatures:
                raise InputError(
                    f"reports: expected the same numbers of requests at once and temperatures of every draft length, "
                    f"found none of {requests} at once with γ = {length} at every temperature"
                )
    goodput = {
        requests: {0: 1.0} | {length: harmonic_mean(list(by_length[length].values())) for length in sorted(by_length)}
        for requests, by_length in sorted(speeds.items())
    }
    table = ranges(_between(chosen_lengths(goodput)), max(goodput))
    drafters = {config.drafter_name: entry(config.path, sorted(temperatures), table)}
    write_json(output / FILE, {"schema": SCHEMA, "target": config.target, "drafters": drafters})
    return goodput


def _between(chosen: Mapping[int, int]) -> dict[int, int]:
    """Return the draft length at every load: that of the measured load nearest by ratio."""
    sizes = sorted(chosen)
    nearest = {
        load: min(sizes, key=lambda size: (abs(math.log(size / load)), -size)) for load in range(1, sizes[-1] + 1)
    }
    return {load: chosen[size] for load, size in nearest.items()}


def _runs(file: Path) -> list[Mapping[str, Any]]:
    try:
        report = parse_json(file.read_text(encoding="utf-8"))
        runs: list[Mapping[str, Any]] = report["runs"]
        if report["server"] is None or not runs:
            raise KeyError
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"reports: expected a report of `measure --server` in {file}, found none") from error
    return runs


def _print_load(goodput: Mapping[int, Mapping[int, float]]) -> None:
    """Print for each load the draft length taken, and the speed-ups over the server without drafts."""
    for requests, length in chosen_lengths(goodput).items():
        by_length = goodput[requests]
        speedups = ", ".join(f"{k}: {by_length[k]:.2f}×" for k in sorted(by_length))
        print(f"{requests} at once: γ = {length}; speed-up by γ: {speedups}")
        if max(by_length.values()) < 1:
            print(f"{requests} at once: a server without a drafter is faster than all of these")


def main(argv: Sequence[str] | None = None) -> int:
    """Find the draft lengths, and print the table and the command that exports them."""
    config = parse_config(LoadConfig, argv, prog="draftsmith tune")
    _print_load(tune_load(config))
    print(f"draftsmith export --format vllm --draft_lengths {Path(config.output) / FILE}")
    return 0
