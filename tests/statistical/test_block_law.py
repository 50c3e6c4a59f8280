"""The law of text that block drafters help to write, exactly (`enumeration`): a wrong q is caught.

The shapes themselves are among those of `test_enumeration`.
"""

from dataclasses import replace

import pytest
import torch
from specimens import DFLASH2, RECURRENT, block
from statistical.test_enumeration import PROMPTS, ROUNDING, compute_in_double, difference, laws, llama  # noqa: F401

from draftsmith.medusa import BlockProposer


class Unrefined(BlockProposer):
    """Says that guesses were drawn from their laws before a head changed them."""

    def told(self, hidden, side, head):
        return head(hidden)

    def propose(self, contexts, draft_lengths):
        plain, refine = [], self.heads.logits

        def logits(hidden, side, head):
            plain.append(self.told(hidden, side, head))
            return refine(hidden, side, head)

        self.heads.logits = logits
        drafts = list(super().propose(contexts, draft_lengths))
        del self.heads.logits
        for i, draft in enumerate(drafts):
            if draft.probabilities is not None and len(draft.tokens):
                scores = torch.cat([logits_BPD[i] for logits_BPD in plain])[: len(draft.tokens)]
                drafts[i] = replace(draft, probabilities=self.samplers[i].scores(scores, []).softmax(-1))
        return drafts


@pytest.mark.parametrize(
    "shape",
    [RECURRENT | {"anchor_guesses": False, "block_size": 4}, RECURRENT],
    ids=["Domino, fill-in", "Domino"],
)
def test_the_q_of_an_unrefined_guess_is_caught(llama, monkeypatch, shape):  # noqa: F811
    compute_in_double(monkeypatch, llama)
    drafter = block(llama, **{"markov_rank": 0, **shape})
    for parameter in drafter.side_head.parameters():
        torch.nn.init.normal_(parameter)
    drafted = [laws(llama, kind(drafter), "T=1", PROMPTS[:1]) for kind in (BlockProposer, Unrefined)]
    right, wrong = (difference(law, wanted) for (law,), (wanted,), _ in drafted)
    assert right < ROUNDING and wrong > 1e-4


class Unlimited(Unrefined):
    """Says that guesses were drawn among all tokens, where a head chose among a few."""

    def told(self, hidden, side, head):
        return head.finish(head.project(hidden) + self.heads.side_head.out(side))


@pytest.mark.parametrize("shape", [{"anchor_guesses": False, "block_size": 4}, {}], ids=["fill-in", "anchor guesses"])
def test_the_q_of_other_tokens_than_candidates_is_caught(llama, monkeypatch, shape):  # noqa: F811
    compute_in_double(monkeypatch, llama)
    drafter = block(llama, **DFLASH2 | {"selector_top_k": 2}, **shape)
    for parameter in drafter.candidate_selector.parameters():
        torch.nn.init.normal_(parameter)
    drafted = [laws(llama, kind(drafter), "T=1", PROMPTS[:1]) for kind in (BlockProposer, Unrefined, Unlimited)]
    right, plain, unlimited = (difference(law, wanted) for (law,), (wanted,), _ in drafted)
    assert right < ROUNDING and plain > 1e-4 and unlimited > 1e-4
