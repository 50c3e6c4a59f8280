"""A plan of draft lengths: what it learns, by a clock of its own, and what it chooses."""

from types import SimpleNamespace

import pytest
import torch

from draftsmith.decode import Proposal, Proposer, Tree
from draftsmith.decode.clock import PROGRAMS
from draftsmith.decode.planning import plan as plans
from draftsmith.decode.planning.costs import RoundCosts
from draftsmith.decode.planning.plan import Plan


def test_a_plan_gives_up_tries_again_and_comes_back(target):
    """It tries the 16th round, and each time after twice as many; what is accepted there is looked at then."""
    plan, proposer = Plan(RoundCosts({1: 1.0, 9: 1.0}, draft_step=0.3), longest=4), Clocked(True, [0.0])
    plan.start(target, proposer, 1, 8, False)
    plan._rejected, lengths = 60.0, []
    for turn in range(100):
        (draft,) = plan.propose(target, proposer, [torch.zeros(3)], [9])
        lengths.append(draft.tree.depth)
        plan.observe(lengths[-1] if turn >= 32 else 0, draft, lengths[-1])
        if turn == 32:
            plan._accepted = 600.0
    assert [turn for turn, length in enumerate(lengths[:48], 1) if length] == [16, 48]
    assert lengths[15] == 1 and set(lengths[47:]) == {4}


def chain(length, confidence=None):
    return Proposal(torch.zeros(length, dtype=torch.long), None, Tree.chain(length), confidence)


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
    monkeypatch.setattr(plans, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(plans, "verification_costs", lambda *a, **k: {1: 1.0, 2: 1.0, 9: 1.0})
    for at_once, longest, best in ((True, 6, 6), (True, None, 8), (False, None, 0)):
        plan, proposer = Plan(), Clocked(at_once, clock, longest)
        plan.start(target, proposer, 1, 8, False)
        for _ in range(5):  # the second round is the first that is timed
            plan.propose(target, proposer, [torch.zeros(3)], [9])
        plan._accepted, plan._rejected = (1000.0, 1e-9) if at_once else (1.0, 3.0)
        plan._holds = 0
        assert plan.draft_length() == best


def test_a_plan_learns_what_rounds_take(target, monkeypatch):
    """A forward takes 1 s at any length, but a round 0.5 s more, and 0.25 s with each drafted token; once 100 s."""
    clock, plan = [0.0], Plan(longest=4)
    monkeypatch.setattr(plans, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(plans, "verification_costs", lambda *a, **k: {1: 1.0, 5: 1.0})
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
    assert costs.target[1] + costs.plain_overhead == pytest.approx(1.5)  # of the rounds that drafted nothing
    assert plan._costs(7) == costs  # the nearest number of rows that is known


def test_a_plan_of_a_drafter_that_drafts_at_once_tries_shorter_drafts(target, monkeypatch):
    """Each drafted token takes 0.25 s: drafts that nothing cuts are tried at half of γ while that is not known."""
    clock, plan = [0.0], Plan(longest=4)
    monkeypatch.setattr(plans, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(plans, "verification_costs", lambda *a, **k: {1: 1.0, 5: 1.0})
    proposer, depths = Confident(plan, [0.9] * 4), []
    plan.start(target, proposer, 1, 8, False)
    for _ in range(150):
        (draft,) = plan.propose(target, proposer, [torch.zeros(3)], [4])
        depths.append(draft.tree.depth)
        plan.observe(depths[-1], draft, depths[-1])
        clock[0] += 1.5 + 0.25 * depths[-1]
    assert set(depths) == {0, 2, 4} and 5 <= depths.count(2) <= 15
    assert depths[3:5] == [0, 0] and depths[5:].count(0) <= 6  # to know what a round without a draft takes
    assert [plan._costs(1).round_seconds(k) for k in (2, 4)] == pytest.approx([2.0, 2.5], abs=0.05)


def test_a_plan_drafts_at_once_what_pays(target, monkeypatch):
    """A drafted token takes 0.5 s even if it is cut, and the first one is accepted: longer drafts bring nothing."""
    clock, plan = [0.0], Plan(longest=4)
    monkeypatch.setattr(plans, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(plans, "verification_costs", lambda *a, **k: {1: 1.0, 5: 1.4})
    proposer, lengths = Confident(plan, [0.9, 0.4, 0.4, 0.4]), []
    propose, proposer.propose = proposer.propose, lambda contexts, k: lengths.append(k[0]) or propose(contexts, k)
    plan.start(target, proposer, 1, 8, False)
    for _ in range(200):
        (draft,) = plan.propose(target, proposer, [torch.zeros(3)], [4])
        plan.observe(min(1, draft.tree.depth), draft, draft.tree.depth)
        clock[0] += 1.0 + 0.5 * lengths[-1] + 0.1 * draft.tree.depth
    assert lengths[1] == 4 and lengths[100:].count(1) > 85 and 3 <= lengths[100:].count(0) <= 8
