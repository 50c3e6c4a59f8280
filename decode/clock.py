"""The clock of every measurement: it waits for the device, and calls that are compared take turns."""

import time
from collections.abc import Callable, Hashable, Mapping
from statistics import median_high
from typing import TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


def now(device: torch.device | None = None) -> float:
    """Return the time in seconds, once the device has done its work; None is the current GPU, where there is one."""
    if torch.cuda.is_available() and (device is None or device.type == "cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(call: Callable[[], Result], device: torch.device | None = None) -> tuple[float, Result]:
    """Return how many seconds a call takes, and what it returns."""
    begin = now(device)
    result = call()
    return now(device) - begin, result


def median_seconds(
    calls: Mapping[Key, Callable[[], object]], repeats: int, device: torch.device | None = None
) -> dict[Key, float]:
    """Return the median seconds of each call; they take turns, `repeats` times and once before to warm up."""
    seconds: dict[Key, list[float]] = {key: [] for key in calls}
    for _ in range(repeats + 1):
        for key, call in calls.items():
            seconds[key].append(timed(call, device)[0])
    return {key: median_high(of_call[1:]) for key, of_call in seconds.items()}
