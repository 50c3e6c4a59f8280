"""Timing: a call that compiles is made again."""

from itertools import count

import pytest
import torch

from draftsmith.decode.clock import compilations, speed, timed_warm


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
