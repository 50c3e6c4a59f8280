"""Costs, lengths and the choice between them, by hand."""

import pytest

from draftsmith.decode import InputError
from draftsmith.decode.planner import Costs, Plan, acceptance_length, best_draft_length, verification_costs


def test_verification_is_interpolated_and_extrapolated():
    costs = Costs({1: 1.0, 3: 2.0, 7: 3.0}, draft_step=0.1)
    assert [costs.verification(k) for k in (1, 2, 3, 5, 7, 9)] == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0, 3.5])
    assert Costs({1: 2.0}, 0.1).verification(5) == 2.0
    with pytest.raises(InputError, match=r"costs: expected the target's seconds for 1 token among them, found \[2\]"):
        Costs({2: 1.0}, 0.1)


def test_speedup_is_leviathans_where_verifying_is_free():
    """Theorem 3.8: (1 − α^{γ+1}) ÷ ((1 − α)(γ c + 1))."""
    alpha, c = 0.7, 0.1
    costs = Costs({1: 1.0, 9: 1.0}, draft_step=c)
    for gamma in range(9):
        tau = acceptance_length([alpha] * gamma)
        assert tau == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))
        assert costs.speedup(tau, gamma) == pytest.approx(tau / (gamma * c + 1))
    assert costs.speedup(1.0, 0) == 1.0
    assert acceptance_length([0.5, 0.5, 1.0]) == 1 + 0.5 + 0.25 + 0.25


@pytest.mark.parametrize(("alpha", "step", "best"), [(0.0, 0.01, 0), (1.0, 0.01, 8), (0.5, 2.0, 0), (0.6, 0.2, 2)])
def test_the_best_length(alpha, step, best):
    costs = Costs({1: 1.0, 9: 1.0}, draft_step=step)
    assert best_draft_length(costs, alpha, 8) == best
    speedups = [costs.speedup(acceptance_length([alpha] * k), k) for k in range(9)]
    assert speedups[best] == max(speedups)


def test_a_plan_gives_up_probes_and_comes_back():
    plan = Plan(Costs({1: 1.0, 9: 1.0}, draft_step=0.3), longest=4)
    assert plan.draft_length() > 0
    for _ in range(60):
        plan.observe(accepted=0, drafted=2)
    lengths = [plan.draft_length() for _ in range(48)]
    assert set(lengths) == {0, 1} and sum(lengths) == 3
    for _ in range(60):
        plan.observe(accepted=1, drafted=1)
    assert plan.draft_length() == 4


def test_costs_are_measured(target):
    costs = verification_costs(target, rows=2, context=10, tokens=[1, 4], repeats=3)
    assert sorted(costs) == [1, 4] and min(costs.values()) > 0
