"""`python -m benchmarks.divergence`: the loss in bounded memory against the eager one.

Loss and gradients of one batch, by either way in turns in one process. Memory is the peak over what was there before:
on CUDA the allocator's, on Linux the process's resident set, whose high-water mark is reset before it. The first turn
is measured, on Linux with an allocator that hands back what is freed; that costs time, so the later ones are timed.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import BenchmarkConfig, in_turns, main
from draftsmith.decode.errors import InputError, one_of, require
from draftsmith.train.losses.chunked import lean_divergence
from draftsmith.train.losses.divergences import NAMES, divergence
from draftsmith.train.models import DTYPES, default_device

M_MMAP_THRESHOLD = -3  # of malloc.h
HANDS_BACK, USUAL = 2**20, 2**25  # bytes; the second is what glibc's own threshold grows to


@dataclass
class BenchDivergenceConfig(BenchmarkConfig):
    """Time and memory of loss and gradients over a large vocabulary."""

    divergence: str = "forward_kl"
    """The divergence."""
    tokens: int = 2048
    """N, positions of a batch."""
    vocab_size: int = 128_000
    """V."""
    hidden: int = 1024
    """H of the draft."""
    target_hidden: int = 1024
    """H of the target."""
    dtype: str = "float32"
    """Dtype of hidden states and heads."""
    chunk_size: int | None = None
    """Positions a chunk; the default's if None."""
    repeats: int = 5
    """Timed turns of either way, after one that memory is measured in."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, one_of(NAMES), "divergence")
        require(self, one_of(DTYPES), "dtype")


def bench(config: BenchDivergenceConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures.

    Raises:
        InputError: a device whose peak of memory cannot be read.
    """
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

    losses = {"eager": partial(differentiated, eager), "lean": partial(differentiated, lean)}
    _set_mmap_threshold(device, HANDS_BACK)
    peaks, results = {}, {}
    for name, loss in losses.items():
        before = _reset_peak(device)
        results[name] = loss()
        peaks[name] = _peak(device) - before
    pairs = zip(results["eager"], results["lean"], strict=True)
    errors = [float((a - b).abs().max() / a.abs().max()) for a, b in pairs]
    results.clear()
    _set_mmap_threshold(device, USUAL)
    calls = {name: partial(_discarded, loss) for name, loss in losses.items()}
    turns = [in_turns(calls, turn=0) for _ in range(config.repeats)]
    seconds = {name: [turn[name][0] for turn in turns] for name in losses}
    ratios = [lean / eager for eager, lean in zip(*seconds.values(), strict=True)]
    return {
        "seconds": {name: median(values) for name, values in seconds.items()},
        "time_ratio": {"median": median(ratios), "min": min(ratios), "max": max(ratios)},
        "peak_bytes": peaks,
        "gradient_bytes": sum(tensor.numel() * tensor.element_size() for tensor in (q_hidden, q_head)),
        # A loss that is too small to need more memory than the process already has shows no peak.
        "memory_ratio": peaks["lean"] / peaks["eager"] if peaks["eager"] else None,
        "relative_error": dict(zip(("loss", "hidden", "head"), errors, strict=True)),
    }


def _discarded(loss: Callable[[], list[Tensor]]) -> None:
    # A result that is kept would lessen the memory of the next call.
    loss()


def _set_mmap_threshold(device: torch.device, threshold: int) -> None:
    if device.type == "cpu":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, threshold)


def _reset_peak(device: torch.device) -> int:
    """Forget the peak and return what is held now, in bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _peak(device)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


if __name__ == "__main__":
    main(BenchDivergenceConfig, bench)
