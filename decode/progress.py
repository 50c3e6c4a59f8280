"""Progress of a command: bars on a terminal, and elsewhere, such as in a job's log, a line now and then.

A library prints nothing. A command does, within `reporting`, in the first process of a job. Slow work opens a `phase`;
of nested phases the innermost is reported. A thread reports too, since a single call may take minutes.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

INTERVAL = 10.0  # seconds between two lines; a command that ends before the first line prints nothing
LOOK = 1.0  # seconds between two checks of the open phase, and before a bar is shown
COUNTED = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}{postfix}]"
UNCOUNTED = "{desc} [{elapsed}{postfix}]"

T = TypeVar("T")


class Phase:
    """One step of a command, and its progress."""

    def __init__(self, title: str, total: int | None = None, unit: str = "", done: int = 0):
        self.title, self.total, self.unit = title, total, unit
        self.done = self.begun_at = done
        self.note = ""

    def advance(self, count: int = 1, note: str | None = None) -> None:
        """Count finished items, and replace the note if one is given."""
        self.done += count
        self.note = self.note if note is None else note
        if _reporter is not None:
            _reporter.look(self)

    def line(self, seconds: float) -> str:
        """Return the progress after some seconds as one line."""
        parts = [] if self.total is None else [f"{self.done} of {self.total} {self.unit}"]
        parts += [self.note] if self.note else []
        parts.append(time_text(seconds))
        if self.total is not None and self.done > self.begun_at:
            parts.append(f"{time_text(seconds * (self.total - self.done) / (self.done - self.begun_at))} left")
        return f"{self.title}: {', '.join(parts)}"


class Reporter:
    """Reports the open phases."""

    def __init__(self, every: float, bars: bool, clock: Callable[[], float] = time.monotonic):
        """Report by bars, or by a line once `every` seconds have passed without one."""
        self._every, self._bars, self._clock = every, bars, clock
        self._open: dict[Phase, tuple[float, Any]] = {}
        self._last_line = clock()
        self._lock = threading.RLock()  # bars are drawn by two threads

    @contextmanager
    def reports(self, phase: Phase) -> Iterator[None]:
        """Report a phase while it lasts."""
        with self._lock:
            self._open[phase] = self._clock(), self._bar(phase) if self._bars else None
        self.look(phase)
        try:
            yield
        finally:
            with self._lock:
                _, bar = self._open.pop(phase)
                if bar is not None:
                    self._draw(phase, bar)
                    bar.close()

    def look(self, phase: Phase | None = None) -> None:
        """Report a phase's progress if it is due; the innermost phase by default."""
        with self._lock:
            phase = next(reversed(self._open), None) if phase is None else phase
            if phase is None or phase not in self._open:
                return
            start, bar = self._open[phase]
            if bar is not None:
                self._draw(phase, bar)
            elif (now := self._clock()) - self._last_line >= self._every:
                self._last_line = now
                with contextlib.suppress(OSError, ValueError):  # a closed pipe
                    print(phase.line(now - start), file=sys.stderr, flush=True)

    def _bar(self, phase: Phase) -> Any:
        from tqdm.auto import tqdm

        return tqdm(
            total=phase.total,
            initial=phase.done,
            desc=phase.title,
            unit=phase.unit,
            delay=LOOK,
            miniters=0,
            leave=phase.total is not None and not self._open,
            dynamic_ncols=True,
            bar_format=UNCOUNTED if phase.total is None else COUNTED,
        )

    def _draw(self, phase: Phase, bar: Any) -> None:
        bar.total = phase.total
        bar.set_postfix_str(phase.note, refresh=False)
        bar.update(phase.done - bar.n)


_reporter: Reporter | None = None


@contextmanager
def reporting(every: float | None = None, bars: bool | None = None) -> Iterator[None]:
    """Report all phases in this block, in the first process of a job; a nested block does nothing.

    Lines come `every` seconds, `INTERVAL` if None; with `bars`, by default on a terminal, there are bars instead.
    """
    global _reporter
    if _reporter is not None or os.environ.get("RANK", "0") != "0":
        yield
        return
    _reporter = reporter = Reporter(INTERVAL if every is None else every, sys.stderr.isatty() if bars is None else bars)
    end = threading.Event()

    def watch() -> None:  # a single call may take minutes without `advance`
        while not end.wait(LOOK):
            reporter.look()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        end.set()
        _reporter = None


@contextmanager
def phase(title: str, total: int | None = None, unit: str = "", done: int = 0) -> Iterator[Phase]:
    """Open a phase for slow work, which a command reports; `total` may change later, and `unit` is a plural."""
    current = Phase(title, total, unit, done)
    with contextlib.nullcontext() if _reporter is None else _reporter.reports(current):
        yield current


def track(items: Iterable[T], title: str, unit: str, total: int | None = None) -> Iterator[T]:
    """Yield items in a phase that counts the finished ones; `total` is for items without a length."""
    with phase(title, len(items) if isinstance(items, Sized) else total, unit) as current:
        for item in items:
            yield item
            current.advance()


def time_text(seconds: float) -> str:
    """Format a time as hours, minutes and seconds: 1:02:03 or 4:05."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
