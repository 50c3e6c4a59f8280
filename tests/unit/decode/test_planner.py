"""Costs, lengths and the choice between them, by hand."""

from types import SimpleNamespace

import pytest
import torch

from draftsmith.decode import InputError, Proposal, Proposer, Tree, planner
from draftsmith.decode.clock import PROGRAMS
from draftsmith.decode.planner import Plan, RoundCosts, acceptance_length, best_draft_length, verification_costs


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
        tau = acceptance_length([alpha] * gamma)
        assert tau == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))
        assert costs.speedup(tau, gamma) == pytest.approx(tau / (gamma * c + 1))
    assert costs.speedup(1.0, 0) == 1.0
    assert acceptance_length([0.5, 0.5, 1.0]) == 1 + 0.5 + 0.25 + 0.25


def test_a_round_verifies_the_nodes_of_a_tree_in_place_of_a_chain():
    costs = RoundCosts({1: 1.0, 3: 2.0, 7: 3.0}, draft_step=0.1, overhead=0.5, draft_start=0.2, plain_overhead=0.25)
    assert costs.round_seconds(2) == pytest.approx(0.2 + 2 * 0.1 + 2.0 + 0.5)
    assert costs.round_seconds(2, nodes=6) == pytest.approx(0.2 + 2 * 0.1 + 3.0 + 0.5)
    assert costs.round_seconds(2, nodes=0.5) == pytest.approx(0.2 + 2 * 0.1 + 1.25 + 0.5)  # on the mean, n-grams
    # Plain decoding pays for its own loop.
    assert costs.speedup(2.5, 2) == pytest.approx(2.5 * 1.25 / 2.9)
    assert costs.speedup(2.5, 2, nodes=6) == pytest.approx(2.5 * 1.25 / 3.9)


@pytest.mark.parametrize("nodes", [None, 6])
def test_the_break_even_length_is_as_fast_as_plain_decoding(nodes):
    costs = RoundCosts({1: 1.0, 3: 2.0, 7: 3.0}, draft_step=0.1, overhead=0.5, plain_overhead=0.25)
    for gamma in (1, 2, 5):
        length = costs.break_even_length(gamma, nodes)
        assert costs.speedup(length, gamma, nodes) == pytest.approx(1.0)
        assert length == pytest.approx(costs.round_seconds(gamma, nodes) / 1.25)


def test_the_break_even_acceptance_is_as_fast_as_plain_decoding():
    costs = RoundCosts({1: 1.0, 9: 1.4}, draft_step=0.2, overhead=0.1)
    for gamma in (1, 2, 4, 8):
        alpha = costs.break_even_acceptance(gamma)
        assert costs.speedup(acceptance_length([alpha] * gamma), gamma) == pytest.approx(1.0)
    assert costs.break_even_acceptance(1) == pytest.approx(1.05 + 0.2 + 0.1 - 1)  # τ(1) = 1 + α
    # A draft token that takes as long as the target's own never pays, one that takes next to nothing always does.
    assert RoundCosts({1: 1.0, 9: 1.0}, draft_step=1.0, overhead=0.1).break_even_acceptance(4) is None
    assert RoundCosts({1: 1.0}, draft_step=0.01, plain_overhead=0.2).break_even_acceptance(4) < 1e-9


@pytest.mark.parametrize(("alpha", "step", "best"), [(0.0, 0.01, 0), (1.0, 0.01, 8), (0.5, 2.0, 0), (0.6, 0.2, 2)])
def test_the_best_length(alpha, step, best):
    costs = RoundCosts({1: 1.0, 9: 1.0}, draft_step=step)
    assert best_draft_length(costs, [alpha**k for k in range(1, 9)]) == best
    speedups = [costs.speedup(acceptance_length([alpha] * k), k) for k in range(9)]
    assert speedups[best] == max(speedups)


def test_a_plan_gives_up_probes_and_comes_back():
    plan = Plan(RoundCosts({1: 1.0, 9: 1.0}, draft_step=0.3), longest=4)
    assert plan.draft_length() > 0
    for _ in range(60):
        plan.observe(0, chain(2), drafted=2)
    lengths = [plan.draft_length() for _ in range(48)]
    assert [round for round, length in enumerate(lengths, 1) if length] == [16, 32] and max(lengths) == 1
    for _ in range(60):
        plan.observe(1, chain(1), drafted=1)
    assert plan.draft_length() == 4


def chain(length, confidence=None):
    return Proposal(torch.zeros(length, dtype=torch.long), None, Tree.chain(length), confidence)


def test_a_slot_is_priced_with_those_that_may_follow_it():
    """A second token takes 1 s, a third and a fourth 0.2 s: half of the first slot's tokens go on to the next."""
    costs = RoundCosts({1: 1.0, 2: 2.0, 3: 2.2, 4: 2.4}, draft_step=0.0)
    assert costs.slot_prices(3, 0.5) == pytest.approx([1.4 / 1.75, 0.2, 0.2])
    # Each slot has its draft to pay for, but not the one that is drafted.
    assert costs.slot_prices(3, 0.5, 0.1) == pytest.approx([1.3 / 1.5, 0.2, 0.2])
    assert costs.slot_prices(3, 0.5, 0.1, drafted=False) == pytest.approx([1.4 / 1.5, 0.3, 0.3])


class Confident(Proposer):
    """Drafts a chain of known confidence at once, and ends it where the plan says."""

    at_once = cuts = True

    def __init__(self, plan, confidence):
        self.plan, self.confidence = plan, torch.tensor([confidence])

    def propose(self, contexts, draft_lengths):
        (length,) = self.plan.cut.cut(self.confidence[:, : draft_lengths[0]], draft_lengths)
        return [chain(length, self.confidence[0, :length])]


def test_a_plan_verifies_what_is_likely_to_be_accepted(target):
    """A token a second is the least: a slot of 0.2 s is worth a survival of 0.2, and more where rounds bring more."""
    plan = Plan(RoundCosts({1: 1.0, 9: 2.6}, draft_step=0.0), longest=8)
    for confidence, length, tokens in (([0.9] * 3 + [0.1] * 5, 3, 4), ([0.1] * 8, 0, 1)):
        proposer = Confident(plan, confidence)
        plan.start(target, proposer, 1, 8, False)
        for _ in range(100):
            (draft,) = plan.propose(target, proposer, [torch.zeros(3)], [8])
            plan.observe(min(tokens - 1, draft.tree.depth), draft, draft.tree.depth)
        assert draft.tree.depth == length
    plan.observe(0, chain(0), 0)


class Clocked(Proposer):
    """Drafts what was asked for in a time that is its first forward's, or each token's, for a round of 1 s."""

    def __init__(self, at_once, clock, longest=None):
        self.at_once, self.clock, self.longest = at_once, clock, longest

    def propose(self, contexts, draft_lengths):
        self.clock[0] += 1.0 + (1.0 if self.at_once else 0.5 * draft_lengths[0])
        return [Proposal(torch.zeros(k, dtype=torch.long), None, Tree.chain(k)) for k in draft_lengths]


def test_what_drafts_at_once_is_priced_by_the_draft(target, monkeypatch):
    """Four tokens a draft: one forward of 1 s, or four of 0.5 s; where all are accepted the one pays to its longest."""
    clock = [0.0]
    monkeypatch.setattr(planner, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(planner, "verification_costs", lambda *a, **k: {1: 1.0, 2: 1.0, 9: 1.0})
    for at_once, longest, best in ((True, 6, 6), (True, None, 8), (False, None, 0)):
        plan, proposer = Plan(), Clocked(at_once, clock, longest)
        plan.start(target, proposer, 1, 8, False)
        for _ in range(5):  # the second round is the first that is timed
            plan.propose(target, proposer, [torch.zeros(3)], [9])
        plan._accepted, plan._rejected = (1000.0, 1e-9) if at_once else (1.0, 3.0)
        assert plan.draft_length() == best


def test_a_plan_learns_what_rounds_take(target, monkeypatch):
    """A forward takes 1 s at any length, but a round 0.5 s more, and 0.25 s with each drafted token; once 100 s."""
    clock, plan = [0.0], Plan(longest=4)
    monkeypatch.setattr(planner, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(planner, "verification_costs", lambda *a, **k: {1: 1.0, 5: 1.0})
    proposer = Confident(plan, [0.9] * 4)
    plan.start(target, proposer, 1, 8, False)
    for turn in range(60):
        (draft,) = plan.propose(target, proposer, [torch.zeros(3)], [4 - turn % 4])
        plan.observe(draft.tree.depth, draft, draft.tree.depth)
        clock[0] += 100.0 if turn in (0, 20) else 1.5 + 0.25 * draft.tree.depth
        if turn == 30:  # in which a program was compiled
            PROGRAMS.append(0.0)
            clock[0] += 100.0
    costs = plan._costs(1)
    assert [costs.round_seconds(k) for k in range(5)] == pytest.approx([1.5 + 0.25 * k for k in range(5)], abs=0.03)
    assert costs.target[1] + costs.plain_overhead == 1.0  # plain decoding was never tried
    assert plan._costs(7) == costs  # the nearest number of rows that is known


def test_a_plan_of_a_drafter_that_drafts_at_once_tries_shorter_drafts(target, monkeypatch):
    """Each drafted token takes 0.25 s: drafts that nothing cuts are tried at half of γ while that is not known."""
    clock, plan = [0.0], Plan(longest=4)
    monkeypatch.setattr(planner, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(planner, "verification_costs", lambda *a, **k: {1: 1.0, 5: 1.0})
    proposer, depths = Confident(plan, [0.9] * 4), []
    plan.start(target, proposer, 1, 8, False)
    for _ in range(150):
        (draft,) = plan.propose(target, proposer, [torch.zeros(3)], [4])
        depths.append(draft.tree.depth)
        plan.observe(depths[-1], draft, depths[-1])
        clock[0] += 1.5 + 0.25 * depths[-1]
    assert set(depths) == {2, 4} and 5 <= depths.count(2) <= 15
    assert [plan._costs(1).round_seconds(k) for k in (2, 4)] == pytest.approx([2.0, 2.5], abs=0.05)


def test_a_plan_drafts_at_once_what_pays(target, monkeypatch):
    """A drafted token takes 0.5 s even if it is cut, and the first one is accepted: longer drafts bring nothing."""
    clock, plan = [0.0], Plan(longest=4)
    monkeypatch.setattr(planner, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(planner, "verification_costs", lambda *a, **k: {1: 1.0, 5: 1.4})
    proposer, lengths = Confident(plan, [0.9, 0.4, 0.4, 0.4]), []
    propose, proposer.propose = proposer.propose, lambda contexts, k: lengths.append(k[0]) or propose(contexts, k)
    plan.start(target, proposer, 1, 8, False)
    for _ in range(200):
        (draft,) = plan.propose(target, proposer, [torch.zeros(3)], [4])
        plan.observe(min(1, draft.tree.depth), draft, draft.tree.depth)
        clock[0] += 1.0 + 0.5 * lengths[-1] + 0.1 * draft.tree.depth
    assert lengths[1] == 4 and lengths[100:].count(1) > 90


def test_costs_are_measured(target):
    costs = verification_costs(target, rows=2, context=10, tokens=[1, 4], repeats=3)
    assert sorted(costs) == [1, 4] and min(costs.values()) > 0
