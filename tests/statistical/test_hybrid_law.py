"""The law of text that drafters write in turns, exactly (`enumeration`), and a switch that breaks it."""

import pytest
from conftest import tiny_llama
from enumeration import enumerated, target_law
from specimens import TREE, eagle, medusa, near
from statistical.test_enumeration import PROMPTS, ROUNDING, VOCAB, compute_in_double, difference, laws, llama  # noqa: F401
from transformers import LogitsProcessorList

from draftsmith.decode import DraftModelProposer, HybridProposer, PromptLookupProposer, SuffixProposer, Switch, Tree
from draftsmith.medusa import MedusaProposer
from draftsmith.medusa.eagle.proposer import EagleProposer

LOOSE = Switch(match=1)


def suffix():
    return SuffixProposer(min_match=1)


HYBRIDS = {
    "lookup, draft": lambda target: HybridProposer([PromptLookupProposer(), DraftModelProposer(near(target))], LOOSE),
    "suffix, draft tree": lambda target: HybridProposer([suffix(), DraftModelProposer(near(target, 3), TREE)], LOOSE),
    "suffix, eagle": lambda target: HybridProposer([suffix(), EagleProposer(eagle(target))], LOOSE),
    "suffix, medusa": lambda target: HybridProposer(
        [suffix(), MedusaProposer(medusa(target), Tree.chain(2))], Switch(match=1, score=0.6)
    ),
    "suffix, lookup, draft": lambda target: HybridProposer(
        [suffix(), PromptLookupProposer(), DraftModelProposer(near(target))], lambda evidence: evidence.match > 1
    ),
}


@pytest.mark.parametrize("form", ["one row", "batch"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_every_text_has_the_targets_probability(llama, monkeypatch, name, form):  # noqa: F811
    compute_in_double(monkeypatch, llama)
    alone = form == "one row"
    written, wanted, accepted = laws(
        llama, HYBRIDS[name](llama), "T=0.7 top-k top-p", PROMPTS[: 1 if alone else None], width=1 if alone else 500
    )
    for law, expected in zip(written, wanted, strict=True):
        assert difference(law, expected) < ROUNDING
    assert alone or any(0.02 < share < 0.98 for share in accepted), accepted


class Peeking(HybridProposer):
    """Takes the model's draft where the model is likely to be right about its own token, which it has seen."""

    def propose(self, contexts, draft_lengths):
        drafts = self.last.propose(contexts, draft_lengths)
        copies = self.first[0].find(contexts, draft_lengths)
        return [
            copy.proposal(context) if len(draft.tokens) and int(draft.tokens[0]) < VOCAB // 2 else draft
            for context, draft, copy in zip(contexts, drafts, copies, strict=True)
        ]


def test_a_switch_that_looks_at_what_was_drafted_is_found():
    target = tiny_llama(2, VOCAB, layers=3, hidden=8)
    drafter = Peeking([PromptLookupProposer(), DraftModelProposer(near(target))], LOOSE)
    (written,) = enumerated(target, drafter, PROMPTS[:1], 2, top_k=0)
    wanted = target_law(target, PROMPTS[0], 2, LogitsProcessorList(), None)
    assert difference(written.texts(), wanted) > 1e-3
