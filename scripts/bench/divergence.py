"""`python -m draftsmith.scripts.bench.divergence`: the loss in bounded memory against the eager one.

Loss and gradients of one batch, by either way in turns in one process. Memory is the peak over what was there before:
on CUDA the allocator's, on Linux the process's resident set, whose high-water mark is reset before it. The first turn
is measured, on Linux with an allocator that hands back what is freed; that costs time, so the later ones are timed.
"""

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from draftsmith.decode.errors import InputError
from draftsmith.train.cli import parse_config, run
from draftsmith.train.losses.chunked import lean_divergence
from draftsmith.train.losses.divergences import NAMES, divergence
from draftsmith.train.models import DTYPES, default_device
from draftsmith.train.provenance import environment, write_json

M_MMAP_THRESHOLD = -3  # of malloc.h
HANDS_BACK, USUAL = 2**20, 2**25  # bytes; the second is what glibc's own threshold grows to


@dataclass
class BenchDivergenceConfig:
    """Time and memory of loss and gradients over a large vocabulary."""

    divergence: str = "forward_kl"
    """Which one."""
    tokens: int = 2048
    """N, positions of a batch."""
    vocab_size: int = 128_000
    """V."""
    hidden: int = 1024
    """H of the draft."""
    target_hidden: int = 1024
    """H of the target."""
    dtype: str = "float32"
    """Of hidden states and heads."""
    chunk_size: int | None = None
    """Positions a chunk; the default's if None."""
    repeats: int = 5
    """Timed turns of either way, after one that memory is measured in."""
    threads: int | None = None
    """CPU threads; torch's default if None."""
    output: str | None = None
    """A JSON file for the figures."""

    def __post_init__(self) -> None:
        if self.divergence not in NAMES:
            raise InputError(f"divergence: expected one of {', '.join(NAMES)}, found {self.divergence!r}")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, found {self.dtype!r}")
        for name in ("tokens", "vocab_size", "hidden", "target_hidden", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected at least 1, found {getattr(self, name)}")


def bench(config: BenchDivergenceConfig, console: Console) -> dict[str, Any]:
    """Run the benchmark, print its table and return the figures."""
    if config.threads:
        torch.set_num_threads(config.threads)
    device = default_device()
    if device.type == "cpu" and not Path("/proc/self/clear_refs").exists():
        raise InputError("device: expected CUDA or Linux, where a peak of memory can be read, found neither")
    options: dict[str, Any] = {"device": device, "dtype": DTYPES[config.dtype]}
    torch.manual_seed(0)
    q_hidden = torch.randn(config.tokens, config.hidden, **options).requires_grad_(True)
    p_hidden = torch.randn(config.tokens, config.target_hidden, **options)
    # Logits of standard deviation 2.
    q_head = torch.randn(config.vocab_size, config.hidden, **options).mul_(2 / config.hidden**0.5).requires_grad_(True)
    p_head = torch.randn(config.vocab_size, config.target_hidden, **options).mul_(2 / config.target_hidden**0.5)
    labels = torch.randint(config.vocab_size, (config.tokens,), device=device)

    def eager() -> Tensor:
        return divergence(p_hidden @ p_head.T, q_hidden @ q_head.T, config.divergence, labels=labels)

    def lean() -> Tensor:
        return lean_divergence(
            q_hidden, q_head, p_hidden, p_head, config.divergence, chunk_size=config.chunk_size, labels=labels
        )

    def differentiated(loss: Callable[[], Tensor]) -> list[Tensor]:
        value = loss()
        return [value.detach(), *torch.autograd.grad(value, [q_hidden, q_head])]

    ways = {"eager": eager, "lean": lean}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, int] = {}
    found: dict[str, list[Tensor]] = {}
    for turn in range(config.repeats + 1):
        if device.type == "cpu":
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, USUAL if turn else HANDS_BACK)
        for name, loss in ways.items():
            before = _reset_peak(device)
            begun = time.perf_counter()
            result = differentiated(loss)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - begun)
            else:
                peaks[name] = _peak(device) - before
                found[name] = result
            del result
        if not turn:
            errors = [
                float((a - b).abs().max() / a.abs().max()) for a, b in zip(found["eager"], found["lean"], strict=True)
            ]
            found.clear()
    gradients = q_hidden.numel() * q_hidden.element_size() + q_head.numel() * q_head.element_size()
    ratios = [b / a for a, b in zip(seconds["eager"], seconds["lean"], strict=True)]
    figures = {
        "environment": environment(device, config.dtype),
        "config": vars(config),
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "time_ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "peak_bytes": peaks,
        "gradient_bytes": gradients,
        "memory_ratio": peaks["lean"] / peaks["eager"],
        "relative_error": dict(zip(("loss", "hidden", "head"), errors, strict=True)),
    }
    _print(figures, console)
    if config.output:
        write_json(Path(config.output), figures)
    return figures


def _reset_peak(device: torch.device) -> int:
    """Forget the peak and return what is held now, in bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _peak(device)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def _print(figures: dict[str, Any], console: Console) -> None:
    config, ratio = figures["config"], figures["time_ratio"]
    table = Table(
        title=f"{config['divergence']} and its gradients: {config['tokens']} tokens, vocabulary "
        f"{config['vocab_size']}, hidden {config['hidden']}, {config['dtype']}"
    )
    for column in ("", "seconds", "peak GiB"):
        table.add_column(column, justify="left" if not column else "right")
    for name in ("eager", "lean"):
        table.add_row(name, f"{figures['seconds'][name]:.2f}", f"{figures['peak_bytes'][name] / 2**30:.2f}")
    console.print(table)
    console.print(
        f"lean ÷ eager: time {ratio['median']:.2f} ({ratio['min']:.2f}–{ratio['max']:.2f} over turns), memory "
        f"{figures['memory_ratio']:.3f}, of which the gradients themselves "
        f"{figures['gradient_bytes'] / figures['peak_bytes']['eager']:.3f}"
    )
    worst = max(figures["relative_error"].values())
    console.print(f"largest relative difference of loss and gradients: {worst:.1e}")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the config and run."""
    bench(parse_config(BenchDivergenceConfig, argv, prog="draftsmith.scripts.bench.divergence"), Console())


if __name__ == "__main__":
    sys.exit(run(main))
