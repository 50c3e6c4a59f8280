"""Simulate what verdicts rest on; print how often they are wrong."""

import sys
from functools import partial

import torch

from draftsmith.scripts.bench.common import Figures, run_benchmark
from draftsmith.scripts.bench.gate import BenchGateConfig
from draftsmith.scripts.bench.gate.counts import alarm_figures
from draftsmith.scripts.bench.gate.curves import curve_figures
from draftsmith.scripts.bench.gate.speedups import gate_figures
from draftsmith.train.cli import run
from draftsmith.train.provenance import environment

FIGURES = {"gate": gate_figures, "learning_curve": curve_figures, "reconcile": alarm_figures}


def bench(config: BenchGateConfig) -> Figures:
    """Return the figures of each promise."""
    figures = {title: table for name in config.of for title, table in FIGURES[name](config).items()}
    return {"environment": environment(torch.device("cpu"), "float64"), "config": vars(config)} | figures


if __name__ == "__main__":
    sys.exit(run(partial(run_benchmark, BenchGateConfig, bench)))
