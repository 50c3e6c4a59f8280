"""The one statistic of times: turns that alternate, and the fastest."""

from types import SimpleNamespace

import pytest

from draftsmith.decode import clock


@pytest.fixture
def machine(monkeypatch):
    """A machine whose calls take a second each, twice as long while it is busy."""
    state = SimpleNamespace(now=0.0, busy=lambda now: False)

    def call():
        state.now += 2.0 if state.busy(state.now) else 1.0

    state.call = call
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: state.now))
    return state


def test_two_times_agree_unless_one_was_disturbed():
    assert clock.agree([1.14, 3.0, 1.0]) and not clock.agree([1.16, 1.0]) and clock.agree([2.0])


def test_a_burst_changes_no_least_time_and_is_met_with_more_turns(machine):
    machine.busy = lambda now: 2 <= now < 5  # the first turn, after a warm-up of both calls
    order, calls = [], {name: lambda name=name: (order.append(name), machine.call()) for name in "ab"}
    assert clock.least_seconds(calls, 2) == {"a": 1.0, "b": 1.0}
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"  # turns alternate


def test_what_slows_both_calls_cancels_in_their_ratios():
    plain, own = {0: 1.0, 1: 2.0, 2: 1.0, 3: 1.5}, {0: 1.5, 1: 3.0, 2: 3.0}
    found = clock.ratios(own, plain)
    assert found == [1.5, 1.5, 3.0] and clock.middle(found) == pytest.approx(1.5)
    assert clock.middle([1.0, 4.0]) == pytest.approx(2.0)
    assert clock.near(found) and clock.near([1.0]) and not clock.near([1.5, 3.0])


def test_turns_end_where_times_never_agree_and_skip_what_failed():
    times: dict[str, list[float]] = {"noisy": [], "quiet": [], "failed": []}
    taken = []
    for due in clock.turns(times, 2):
        taken.append(sorted(due))
        times["noisy"].append(2.0 ** -len(taken))
        if "quiet" in due:
            times["quiet"].append(1.0)
    assert taken == [["failed", "noisy", "quiet"]] * 2 + [["noisy"]] * 2
    words = clock.turns_taken([times["noisy"], times["quiet"]], 2)
    assert words.startswith("each of 2 decodes timed 2 times next to plain decoding, the median ratio taken; 1 timed ")
    assert words.endswith("differed by more than 15%, 1 still do") and clock.turns_taken([[1.0]], 1) == "timed once"
