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


def test_what_slows_both_ways_cancels_in_their_ratios():
    compared, slow, taken = clock.Compared("ab", ["plain", "steady", "noisy"]), [1.0, 1.2, 1.0, 1.4], []
    for turn, due in enumerate(compared.turns(2)):
        taken.append({unit: sorted(ways) for unit, ways in due})
        for unit, ways in due:
            for way in ways:
                own = {"plain": 1.0, "steady": 1.5, "noisy": 2.0 if unit == "a" else 1.2**turn}[way]
                compared.times[unit, way][turn] = own * slow[turn]
    assert taken == [{unit: ["noisy", "plain", "steady"] for unit in "ab"}] * 2 + [{"b": ["noisy", "plain"]}] * 2
    assert compared.ratios("b", "steady") == pytest.approx([1.5, 1.5])
    assert compared.ratios("b", "noisy") == pytest.approx([1.0, 1.2, 1.44])  # without the last turn, which took 2.4
    seconds = [compared.seconds(*key) for key in (("a", "plain"), ("a", "steady"), ("b", "noisy"))]
    assert seconds == pytest.approx([1.0, 1.5, 1.2])
    burst = clock.Compared("a", ["plain", "own"])
    burst.times = {("a", "plain"): {0: 1.0, 1: 2.0, 2: 1.1}, ("a", "own"): {0: 1.5, 1: 2.0, 2: 1.65}}  # turn 1
    assert burst.ratios("a", "own") == pytest.approx([1.5, 1.5]) and burst.seconds("a", "own") == pytest.approx(1.5)


def test_turns_end_where_times_never_agree_and_skip_what_failed():
    times, taken = {"noisy": [], "quiet": [], "failed": []}, []
    for due in clock.turns(times, 2):
        taken.append(sorted(due))
        times["noisy"].append(2.0 ** -len(taken))
        if "quiet" in due:
            times["quiet"].append(1.0)
    assert taken == [["failed", "noisy", "quiet"]] * 2 + [["noisy"]] * 2
    words = clock.turns_taken([(4, times["noisy"]), (2, times["quiet"])], 2)
    assert words.startswith("each of 2 decodes timed 2 times next to plain decoding, the median ratio taken; 1 timed ")
    assert words.endswith("differed by more than 15%, 1 still do")
    assert clock.turns_taken([(1, [1.0])], 1) == "timed once"
