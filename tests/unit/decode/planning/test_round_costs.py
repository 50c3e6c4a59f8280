"""The seconds of a round, and the speed-up that they make, by hand."""

import pytest

from draftsmith.decode import InputError
from draftsmith.decode.planning.costs import RoundCosts


def test_verification_is_interpolated_and_extrapolated():
    costs = RoundCosts({1: 1.0, 3: 2.0, 7: 3.0}, draft_step=0.1)
    assert [costs.verification(k) for k in (1, 2, 3, 5, 7, 9)] == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0, 3.5])
    assert RoundCosts({1: 2.0}, 0.1).verification(5) == 2.0
    with pytest.raises(InputError, match=r"costs: expected the target's seconds for 1 token among them, found \[2\]"):
        RoundCosts({2: 1.0}, 0.1)


def test_speedup_is_leviathans_where_verifying_is_free():
    """Theorem 3.8: (1 − α^{γ+1}) ÷ ((1 − α)(γ c + 1))."""
    alpha, c = 0.7, 0.1
    costs = RoundCosts({1: 1.0, 9: 1.0}, draft_step=c)
    for gamma in range(9):
        tau = (1 - alpha ** (gamma + 1)) / (1 - alpha)
        assert costs.speedup(tau, gamma) == pytest.approx(tau / (gamma * c + 1))
    assert costs.speedup(1.0, 0) == 1.0


def test_a_round_verifies_the_nodes_of_a_tree_in_place_of_a_chain():
    costs = RoundCosts({1: 1.0, 3: 2.0, 7: 3.0}, draft_step=0.1, overhead=0.5, draft_start=0.2, plain_overhead=0.25)
    assert costs.round_seconds(2) == pytest.approx(0.2 + 2 * 0.1 + 2.0 + 0.5)
    assert costs.round_seconds(2, nodes=6) == pytest.approx(0.2 + 2 * 0.1 + 3.0 + 0.5)
    # Plain decoding pays for its own loop.
    assert costs.speedup(2.5, 2) == pytest.approx(2.5 * 1.25 / 2.9)
    assert costs.speedup(2.5, 2, nodes=6) == pytest.approx(2.5 * 1.25 / 3.9)
