"""How often drafting makes the host wait for the device: not once a row, and not for what the host knows."""

import pytest
import torch
from conftest import tiny_llama
from waits import Waits

from draftsmith.decode import (
    DraftModelProposer,
    DynamicTree,
    LookaheadProposer,
    PromptLookupProposer,
    planner,
    speculative_generate,
)
from draftsmith.decode.planner import Plan, RoundCosts

PROMPTS = torch.tensor([[5, 6, 7, 5, 6], [9, 9, 4, 9, 9], [1, 2, 3, 4, 1]])
PROPOSERS = {
    # The first round reads the prompts, a row each.
    "lookup": (lambda: PromptLookupProposer(), [3, 0]),
    # The window's next tokens, of all rows at once.
    "lookahead": (lambda: LookaheadProposer(ngram=3, guesses=2), [4, 1]),
    # A depth of a tree is known before the next one is fed.
    "dynamic tree": (lambda: DraftModelProposer(tiny_llama(1), tree=DynamicTree(2, 4)), [4, 4]),
}


@pytest.mark.parametrize("name", PROPOSERS)
def test_reads_of_a_round_do_not_grow_with_rows(monkeypatch, name):
    make, expected = PROPOSERS[name]
    proposer, waits, counts = make(), Waits(), []
    waits.paused = True

    def counted(method, begins: bool):
        def call(*args):
            before, waits.paused = len(waits.seen), False
            out = method(*args)
            waits.paused = True
            counts.append(0) if begins else None
            counts[-1] += len(waits.seen) - before
            return out

        return call

    monkeypatch.setattr(proposer, "propose", counted(proposer.propose, True))
    monkeypatch.setattr(proposer, "commit", counted(proposer.commit, False))
    with waits.counted():
        speculative_generate(tiny_llama(0), proposer, PROMPTS, draft_length=4, max_new_tokens=24, do_sample=False)
    first, later = expected
    assert counts[0] == first and len(counts) > 3
    assert max(counts[1:]) <= later, waits.seen


@pytest.mark.parametrize(("costs", "looks"), [(RoundCosts({1: 1.0, 9: 1.1}, 0.01), 0), (None, 2)])
def test_a_plan_waits_for_the_device_only_where_it_measures(monkeypatch, costs, looks):
    target, times = tiny_llama(0), iter(range(10**6))
    monkeypatch.setattr(planner, "now", lambda device: next(times))
    monkeypatch.setattr(planner, "verification_costs", lambda *args, **options: {1: 1.0, 9: 1.1})
    calls = {"propose": 0}
    proposer = PromptLookupProposer()
    propose = proposer.propose

    def counted(*args):
        calls["propose"] += 1
        return propose(*args)

    monkeypatch.setattr(proposer, "propose", counted)
    speculative_generate(target, proposer, PROMPTS, draft_length=Plan(costs), max_new_tokens=12, do_sample=False)
    assert next(times) == looks * calls["propose"]
