"""Clocks, and what is told of the progress of work."""

import io
import sys
import threading
from itertools import count

import pytest
import torch

from draftsmith.decode import progress
from draftsmith.decode.clock import compilations, speed, timed_warm
from draftsmith.decode.progress import Phase, Reporter, phase, reporting, track


def test_slow_and_fast_speeds_have_three_digits() -> None:
    assert [speed(x) for x in (0.81234, 4.0719, 99.96, 153.4, 12345.6)] == ["0.812", "4.07", "100", "153", "12346"]
    assert speed(None) == "–"


@pytest.fixture
def double():
    """Return a function that compiles for each shape."""
    torch._dynamo.reset()
    return torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)


def test_a_call_that_compiles_is_made_again(double):
    calls = []

    def call(length):
        calls.append(length)
        return double(torch.ones(length)).sum().item()

    before = compilations()
    assert [timed_warm(lambda n=length: call(n))[1] for length in (3, 3, 5, 3)] == [6, 6, 10, 6]
    assert calls == [3, 3, 3, 5, 5, 3] and compilations() == before + 2


def test_a_call_that_always_compiles_ends(double):
    lengths = count(1)
    assert timed_warm(lambda: double(torch.ones(next(lengths))).sum().item())[1] == 2 * 4


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """A command that tells, by a clock that the test sets."""
    clock = Clock()
    monkeypatch.setattr(progress, "_reporter", Reporter(10.0, bars=False, clock=clock))
    return clock


def test_a_line_is_written_when_ten_seconds_have_gone_without_one(clock, capsys):
    with phase("replay", 40, "texts") as replaying:
        for seconds, done in ((4, 5), (5, 5), (2, 10), (9.5, 5), (0.5, 5)):
            clock.now += seconds
            replaying.advance(done)
    assert (
        capsys.readouterr().err == "replay: 20 of 40 texts, 0:11, 0:11 left\nreplay: 30 of 40 texts, 0:21, 0:07 left\n"
    )


def test_many_short_phases_are_told_of_like_a_long_one(clock, capsys):
    for _ in track(range(12), "batches", "batches"):
        with phase("compiling"):
            clock.now += 3
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"batches: {n} of 12 batches" for n in (4, 8, 12)]


def test_the_innermost_phase_is_told_of_while_a_call_lasts(clock, capsys):
    with phase("costs", 3, "batch sizes"), phase("compiling"):
        clock.now = 3700
        progress._reporter.look()
    progress._reporter.look()
    assert capsys.readouterr().err == "compiling: 1:01:40\n"


def test_a_note_and_what_was_done_before_stand_in_the_line():
    line = Phase("prepare", 100, "tokens", done=40)
    line.advance(20, "3 of 5 texts")
    assert line.line(30) == "prepare: 60 of 100 tokens, 3 of 5 texts, 0:30, 1:00 left"
    assert Phase("loading x").line(59.6) == "loading x: 1:00"


def test_a_library_says_nothing_and_a_command_does_until_it_ends(capsys):
    with phase("loading"), reporting(every=0, bars=False):
        list(track("ab", "reading", "files"))
        with reporting(every=0, bars=False):  # of a command that runs another
            pass
        with phase("saving"):
            pass
    with phase("afterwards"):
        pass
    lines = [line.split(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["reading: 0 of 2 files", "reading: 1 of 2 files", "reading: 2 of 2 files", "saving: 0:00"]


def test_one_process_of_a_job_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with reporting(every=0, bars=False), phase("loading"):
        pass
    assert capsys.readouterr().err == ""


def test_a_thread_tells_while_one_call_lasts(monkeypatch):
    """As a compilation, or weights that are read: nothing else runs in this one."""
    spoken = threading.Event()
    monkeypatch.setattr(progress, "LOOK", 0.01)
    with reporting(every=0, bars=False), phase("loading"):
        monkeypatch.setattr(sys, "stderr", Heard(spoken))
        assert spoken.wait(60)


class Heard(io.StringIO):
    def __init__(self, spoken: threading.Event):
        super().__init__()
        self._spoken = spoken

    def write(self, text: str) -> int:
        self._spoken.set()
        return len(text)


def test_a_terminal_has_bars_and_short_phases_none(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with reporting(bars=True), phase("short"):
        pass
    assert screen.getvalue() == ""
    monkeypatch.setattr(progress, "LOOK", 0.0)
    with reporting(bars=True), phase("tune", 4, "texts") as opened:
        opened.total = 2  # less than was thought
        opened.advance(2, "fine")
    assert "tune:   0%" in screen.getvalue() and "0/4 texts" in screen.getvalue()
    assert screen.getvalue().endswith("2/2 texts [00:00<00:00, fine]\n")


def test_nobody_reads_and_the_work_goes_on(monkeypatch):
    gone = io.StringIO()
    gone.close()
    with reporting(every=0, bars=False):
        monkeypatch.setattr(sys, "stderr", gone)
        assert list(track(iter("ab"), "reading", "files", total=2)) == ["a", "b"]
