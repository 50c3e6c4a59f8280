"""The clock of every measurement: it waits for the device, compared calls take turns, and the fastest time counts.

Other work on a machine only ever adds time, in bursts of seconds or minutes. So a call's least time is the best
estimate of what it takes alone; a second one like it, from another turn, says that the first was not disturbed.
"""

import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")

MOST_CALLS = 4  # the limit of repeats, for a call that compiles every time
ALIKE = 1.15  # factor within which the two fastest times of a call agree; a time doubled for a sixth of it does not
MORE = 2  # most turns ÷ those asked for, of calls whose two fastest times do not agree
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
    """Return the least seconds until a call returns, without waiting for its device."""
    seconds = []
    for _ in range(repeats):
        begin = now(device)
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


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


def timed_steps(
    call: Callable[[Callable[..., None]], Result], device: torch.device | None = None
) -> tuple[list[float], Result]:
    """Time a warm call, and on a CPU the steps that it marks, as by an observer; return their seconds and its result.

    Work elsewhere lasts longer than a step: of equal steps in several turns the least are nearly undisturbed. On a GPU
    the host runs ahead, so that only the whole has a time.
    """
    marks: list[float] = []

    def marked() -> Result:
        marks[:] = [time.perf_counter()]
        return call(lambda *_: marks.append(time.perf_counter()))

    seconds, result = timed_warm(marked, device)
    if torch.cuda.is_available() and (device is None or device.type == "cuda"):
        return [seconds], result
    return [*(end - begin for begin, end in pairwise(marks)), max(0.0, seconds - (marks[-1] - marks[0]))], result


def least_of_steps(turns: Sequence[Sequence[float]]) -> float:
    """Return the least seconds of a call over turns: of each of its steps, or of the whole where the steps differ."""
    if len({len(steps) for steps in turns}) == 1:
        return sum(map(min, zip(*turns, strict=True)))
    return min(map(sum, turns))


def agree(seconds: Sequence[float]) -> bool:
    """Return whether the two fastest times of a call are alike; a single time has nothing to differ from."""
    first, second, *_ = [*sorted(seconds), *seconds[:1]]
    return second <= ALIKE * first


def turns(times: Mapping[Key, Sequence[float]], repeats: int) -> Iterator[list[Key]]:
    """Yield for each turn the calls to time: all in `repeats` turns, then those whose two fastest times differ.

    The order rotates from turn to turn. The caller adds each time to the `times`; a call without any has failed.
    """
    for turn in range(MORE * repeats):
        due = [key for key, seconds in times.items() if turn < repeats or (seconds and not agree(seconds))]
        place = turn % max(len(due), 1)
        if due:
            yield due[place:] + due[:place]


def least_seconds(
    calls: Mapping[Key, Callable[[], object]], repeats: int, device: torch.device | None = None
) -> dict[Key, float]:
    """Return the least seconds of each call; the calls take `turns` after a warm-up."""
    for call in calls.values():
        call()
    seconds: dict[Key, list[float]] = {key: [] for key in calls}
    for due in turns(seconds, repeats):
        for key in due:
            seconds[key].append(timed(calls[key], device)[0])
    return {key: min(times) for key, times in seconds.items()}


def turns_taken(times: Collection[Sequence[float]], repeats: int) -> str:
    """Say how often texts were timed, and how many of their times remain in doubt."""
    times = [seconds for seconds in times if seconds]
    words = f"each of {len(times)} decodes timed {repeats} times, the fastest taken" if repeats > 1 else "timed once"
    if again := sum(len(seconds) > repeats for seconds in times):
        words += f"; {again} timed again, since the two fastest differed by more than {ALIKE - 1:.0%}"
        words += f", {sum(not agree(seconds) for seconds in times)} still do"
    return words
