"""The clock of every measurement: it waits for the device, and compared calls take turns.

Other work on a machine only ever adds time, in bursts of seconds or minutes. So a call's least time is the best
estimate of what it takes alone; a second one like it, from another turn, says that the first was not disturbed. Of two
calls that are compared, next to each other in every turn, the median ratio counts: what slows down both cancels.
"""

import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import exp, log
from statistics import median
from typing import Generic, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
Unit = TypeVar("Unit", bound=Hashable)
Way = TypeVar("Way", bound=Hashable)
Result = TypeVar("Result")

MOST_CALLS = 4  # the limit of repeats, for a call that compiles every time
ALIKE = 1.15  # factor within which two times, or ratios, agree; a time doubled for a sixth of it does not
DISTURBED = 1.5  # factor on a call's least time from which a turn is left out, where another one is there
MORE = 2  # most turns ÷ those asked for, of calls that are not settled
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


def compilations() -> int:
    """Return the number of forwards that were compiled or read from disk in this process."""
    # Importing it takes a second; unless it is imported, nothing was compiled.
    dynamo = sys.modules.get("torch._dynamo.utils")
    return len(PROGRAMS) + (dynamo.counters["stats"]["unique_graphs"] if dynamo else 0)


def timed_warm(call: Callable[[], Result], device: torch.device | None = None) -> tuple[float, Result]:
    """Time a call as `timed` does, again while something is compiled in it; the call must do the same each time."""
    for _ in range(MOST_CALLS):
        before = compilations()
        seconds, result = timed(call, device)
        if compilations() == before:
            break
    return seconds, result


def agree(seconds: Sequence[float]) -> bool:
    """Return whether the two fastest times of a call are alike; a single time has nothing to differ from."""
    first, second, *_ = [*sorted(seconds), *seconds[:1]]
    return second <= ALIKE * first


def near(ratios: Sequence[float]) -> bool:
    """Return whether two ratios are alike; a single one has nothing to differ from."""
    return len(ratios) < 2 or any(high <= ALIKE * low for low, high in pairwise(sorted(ratios)))


class Compared(Generic[Unit, Way]):
    """Units of work that are done in several ways, next to each other in turns; the first way is the base.

    The caller adds the seconds of each to `times` by turn; a way without any has failed.
    """

    def __init__(self, units: Iterable[Unit], ways: Sequence[Way]):
        self.units, self.ways = list(units), list(ways)
        self.times: dict[tuple[Unit, Way], dict[int, float]] = {(u, way): {} for u in self.units for way in ways}

    def turns(self, repeats: int) -> Iterator[list[tuple[Unit, list[Way]]]]:
        """Yield for each turn the units with their ways in rotating order: all, then those whose ratios differ."""
        for turn in range(MORE * repeats):
            due = list[tuple[Unit, list[Way]]]()
            for place, unit in enumerate(self.units):
                ways = [way for way in self.ways if turn < repeats or not self._settled(unit, way, repeats)]
                if ways:
                    at = (turn + place) % len(ways)
                    due.append((unit, ways[at:] + ways[:at]))
            if due:
                yield due

    def ratios(self, unit: Unit, way: Way) -> list[float]:
        """Return the ratios of a way's seconds to the base's, in the turns that timed both and disturbed neither."""
        base, own = self.times[unit, self.ways[0]], self.times[unit, way]
        pairs = [(base[turn], seconds) for turn, seconds in own.items() if turn in base]
        most = [DISTURBED * min(column) for column in zip(*pairs, strict=True)]
        kept = [pair for pair in pairs if pair[0] <= most[0] and pair[1] <= most[1]] or pairs
        return [seconds / base_seconds for base_seconds, seconds in kept]

    def seconds(self, unit: Unit, way: Way) -> float:
        """Return the base's least seconds, for another way times the median of its ratios, by their logarithms."""
        least = min(self.times[unit, self.ways[0]].values())
        return least if way == self.ways[0] else least * exp(median(map(log, self.ratios(unit, way))))

    def _settled(self, unit: Unit, way: Way, repeats: int) -> bool:
        if way == self.ways[0]:
            return all(self._settled(unit, other, repeats) for other in self.ways[1:])
        ratios = self.ratios(unit, way)
        return near(ratios) and (len(ratios) >= min(repeats, 2) or not self.times[unit, way])


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


def turns_taken(compared: Collection[tuple[int, Sequence[float]]], repeats: int) -> str:
    """Say how often decodes were timed, by their turns and ratios to plain decoding, and how many remain in doubt."""
    if repeats == 1:
        return "timed once"
    words = f"each of {len(compared)} decodes timed {repeats} times next to plain decoding, the median ratio taken"
    if again := sum(turns > repeats for turns, _ in compared):
        words += f"; {again} timed again, disturbed or with ratios that differed by more than {ALIKE - 1:.0%}"
        words += f", {sum(not near(ratios) for _, ratios in compared)} still do"
    return words
