"""How the time for choosing is spent."""

import pytest

from draftsmith.scripts.choose.schedule import (
    LEAST_GROWTH,
    MOST_GROWTH,
    RUNGS,
    Pace,
    affordable,
    another_amount_fits,
    best_names,
    growth,
    survivors,
)

PACES = [Pace(0.01, 5.0), Pace(0.03, 7.0), Pace(0.02, 6.0)]


def spent(factor: float, rung: int, tokens: float, write: float) -> float:
    """What the rungs behind `rung` take: text, and the trials of those that survive, at a mean pace."""
    total = 0.0
    for ahead in range(rung + 1, RUNGS + 1):
        now = tokens * factor ** (ahead - rung)
        total += write * (now - tokens * factor ** (ahead - rung - 1))
        total += survivors(ahead, len(PACES)) * sum(pace.trial(now) for pace in PACES) / len(PACES)
    return total


def test_all_learn_from_two_amounts_then_half_then_two():
    assert [survivors(rung, 8) for rung in (1, 2, 3, 4)] == [8, 8, 4, 2]
    assert [survivors(rung, 5) for rung in (1, 2, 3, 4)] == [5, 5, 3, 2]
    assert [survivors(rung, 2) for rung in (1, 2, 3, 4)] == [2, 2, 2, 2]
    assert [survivors(rung, 1) for rung in (1, 2, 3, 4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("rung", [1, 2, 3])
@pytest.mark.parametrize("seconds", [400.0, 900.0])
def test_amounts_grow_as_much_as_the_time_allows(rung, seconds):
    factor = growth(seconds, rung, 1000.0, PACES, len(PACES), 0.002, 1e9)
    assert LEAST_GROWTH < factor <= MOST_GROWTH
    needed = spent(factor, rung, 1000.0, 0.002)
    assert needed <= seconds
    assert factor == MOST_GROWTH or needed == pytest.approx(seconds)


def test_amounts_grow_no_further_than_there_are_prompts_and_never_stand_still():
    assert growth(1e9, 1, 1000.0, PACES, 3, 0.0, 8000.0) == pytest.approx(2.0)  # three steps to eight times
    assert growth(0.0, 1, 1000.0, PACES, 3, 0.0, 1e9) == pytest.approx(LEAST_GROWTH)
    assert growth(1e9, 3, 1000.0, PACES, 3, 0.0, 1000.0) == LEAST_GROWTH


def test_all_that_go_on_are_counted_where_some_were_dropped():
    both = growth(700.0, 2, 1000.0, PACES, 6, 0.0, 1e9)  # three of six go on to the third amount, two to the fourth
    assert LEAST_GROWTH < both < growth(700.0, 2, 1000.0, PACES, 3, 0.0, 1e9)
    mean = [sum(pace.trial(1000.0 * both**step) for pace in PACES) / 3 for step in (1, 2)]
    assert 3 * mean[0] + 2 * mean[1] == pytest.approx(700.0)


@pytest.mark.parametrize("rung", [1, 2, 3])
def test_an_amount_that_does_not_fit_is_not_begun(rung):
    needed = 0.002 * 300.0 + survivors(rung + 1, 6) * sum(pace.trial(1300.0) for pace in PACES) / 3
    assert not another_amount_fits(needed - 1, rung, 1000.0, PACES, 6, 0.002, 1.3)
    assert another_amount_fits(needed + 1, rung, 1000.0, PACES, 6, 0.002, 1.3)
    assert not another_amount_fits(needed + 1, rung, 1000.0, PACES, 6, 0.002, 2.0)


def test_what_a_time_buys_is_training_and_the_text_that_is_missing():
    pace = Pace(0.01, 10.0)
    assert affordable(110.0, pace, 20_000, 0.5) == pytest.approx(10_000)  # of the text that is there
    more = affordable(410.0, pace, 20_000, 0.01)
    assert more * 0.01 + (more - 20_000) * 0.01 == pytest.approx(400.0)
    assert affordable(5.0, pace, 20_000, 0.01) == 0


def test_the_best_go_on_in_their_order():
    assert best_names({"a": 0.9, "b": 1.4, "c": 1.1, "d": 1.2}, 2) == ["b", "d"]
    assert best_names({"a": 0.9}, 2) == ["a"]
