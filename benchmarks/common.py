"""Shared by all benchmarks: options and results."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from draftsmith.decode.errors import at_least, require
from draftsmith.decode.measurement.intervals import Estimate, format_estimate
from draftsmith.train.cli import parse_config, run
from draftsmith.train.models import default_device
from draftsmith.train.provenance import environment, write_json

ASSETS = Path(__file__).resolve().parents[1] / "assets"
MAX_PROMPT_TOKENS = 48


@dataclass(kw_only=True)
class BenchmarkConfig:
    """The options of every benchmark."""

    threads: int | None = None
    """CPU threads in all; torch's default if None."""
    output: str | None = None
    """A JSON file for the figures."""

    def __post_init__(self) -> None:
        require(self, at_least(1), *(name for name, value in vars(self).items() if type(value) is int))

    def figures_path(self) -> Path | None:
        """Return where the figures are written, if anywhere."""
        return Path(self.output) if self.output else None


Config = TypeVar("Config", bound=BenchmarkConfig)
Figures = dict[str, Any]
"""A benchmark's results by name: numbers, estimates, words, and groups of them."""


Shown = Callable[[Config, Figures], Figures]
"""Returns what is printed of a benchmark's figures."""


def main(config_class: type[Config], bench: Callable[[Config], Figures], shown: Shown[Config] | None = None) -> None:
    """Run a benchmark as its module's command line says, and end the process."""
    sys.exit(run(lambda: run_benchmark(config_class, bench, shown)))


def run_benchmark(
    config_class: type[Config],
    bench: Callable[[Config], Figures],
    shown: Shown[Config] | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """Parse the config, run a benchmark, write its figures with environment and config, and print them.

    Args:
        config_class: the benchmark's options.
        bench: returns the figures; its own "environment" goes before that of the default device.
        shown: returns what is printed of the figures; all if None.
        argv: the command line; the process's own if None.
    """
    called = Path(sys.argv[0])
    name = called.parent.name if called.stem == "__main__" else called.stem
    config = parse_config(config_class, argv, prog=f"python -m benchmarks.{name}")
    if config.threads:
        torch.set_num_threads(config.threads)
    results = bench(config)
    where = results.pop("environment", None) or environment(default_device(), getattr(config, "dtype", "float32"))
    path = config.figures_path()
    if path is not None:
        write_json(path, {"environment": where} | results | {"config": vars(config)})
    # Wide tables are to be read in files too, where rich would fold them to 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 240, highlight=False)
    console.print(f"{where['device']}, {where['threads']} threads, {where['dtype']}")
    results = shown(config, results) if shown else results
    groups = {name: value for name, value in results.items() if isinstance(value, Mapping)}
    single = {name: value for name, value in results.items() if name not in groups}
    for name, value in (groups | ({"figures": single} if single else {})).items():
        console.print(_table(name, value))


def _table(name: str, figures: Mapping[str, Any]) -> Table:
    """Return a table of figures: a row for each group, with its figures side by side, or for each figure."""
    if all(isinstance(value, Mapping) for value in figures.values()):
        rows = {group: _flat(values) for group, values in figures.items()}
    else:
        rows = {figure: {"": text} for figure, text in _flat(figures).items()}
    columns = dict.fromkeys(column for cells in rows.values() for column in cells)
    table = Table(name.replace("_", " "), box=None)
    for column in columns:
        table.add_column(column, justify="right")
    for row, cells in rows.items():
        table.add_row(row, *(cells.get(column, "") for column in columns))
    return table


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """Write figures; those in groups under the names of both."""
    if isinstance(value, Mapping):
        return {n: text for key, v in value.items() for n, text in _flat(v, f"{name} {key}".strip()).items()}
    if isinstance(value, Estimate):
        text = format_estimate(value, ".4g", spread="interval")
    else:
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return {name.replace("_", " "): text}
