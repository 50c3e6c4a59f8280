"""The clock of every measurement: it waits for the device, and compared calls take turns."""

import sys
import time
from collections.abc import Callable, Hashable, Mapping
from statistics import median_high
from typing import TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")

MOST_CALLS = 4  # the limit of repeats, for a call that compiles every time
PROGRAMS: list[float] = []  # the seconds that each program took to compile or to read from disk in this process


def speed(per_second: float | None) -> str:
    """Format a speed with at least three digits, since some targets are slow: 0.812, 4.07, 1234; "–" for None."""
    if per_second is None:
        return "–"
    return f"{per_second:.0f}" if per_second >= 100 else f"{per_second:.3g}"


def now(device: torch.device | None = None) -> float:
    """Return the time in seconds once the device has finished its work; None is the current GPU, if there is one."""
    if torch.cuda.is_available() and (device is None or device.type == "cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(call: Callable[[], Result], device: torch.device | None = None) -> tuple[float, Result]:
    """Return the seconds that a call takes, and its result."""
    begin = now(device)
    result = call()
    return now(device) - begin, result


def launch_seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds until a call returns, without waiting for its device."""
    seconds = []
    for _ in range(repeats):
        begin = now(device)
        call()
        seconds.append(time.perf_counter() - begin)
    return median_high(seconds)


def compilations() -> int:
    """Return the number of forwards that were compiled or read from disk in this process."""
    dynamo = sys.modules.get(
        "torch._dynamo.utils"
    )  # importing it takes a second; unless it is imported, nothing was compiled
    return len(PROGRAMS) + (dynamo.counters["stats"]["unique_graphs"] if dynamo else 0)


def timed_warm(call: Callable[[], Result], device: torch.device | None = None) -> tuple[float, Result]:
    """Time a call as `timed` does, again while something is compiled in it; the call must do the same each time."""
    for _ in range(MOST_CALLS):
        before = compilations()
        seconds, result = timed(call, device)
        if compilations() == before:
            break
    return seconds, result


def median_seconds(
    calls: Mapping[Key, Callable[[], object]], repeats: int, device: torch.device | None = None
) -> dict[Key, float]:
    """Return the median seconds of each call; the calls take turns, `repeats` times after a warm-up."""
    seconds: dict[Key, list[float]] = {key: [] for key in calls}
    for _ in range(repeats + 1):
        for key, call in calls.items():
            seconds[key].append(timed(call, device)[0])
    return {key: median_high(times[1:]) for key, times in seconds.items()}
