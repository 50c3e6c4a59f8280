"""Simulate what verdicts rest on; print how often they are wrong."""

import torch

from benchmarks.common import Figures, main
from benchmarks.gate import BenchGateConfig
from benchmarks.gate.clocks import clock_figures
from benchmarks.gate.counts import alarm_figures
from benchmarks.gate.speedups import gate_figures
from draftsmith.train.provenance import environment

FIGURES = {"gate": gate_figures, "clock": clock_figures, "reconcile": alarm_figures}


def bench(config: BenchGateConfig) -> Figures:
    """Return the figures of each promise."""
    figures = {title: table for name in config.of for title, table in FIGURES[name](config).items()}
    return {"environment": environment(torch.device("cpu"), "float64")} | figures


if __name__ == "__main__":
    main(BenchGateConfig, bench)
