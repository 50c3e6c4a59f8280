"""Copies and look-ahead are worth their while where they should be."""

import pytest
import torch
from conftest import tiny_llama

from draftsmith.decode import speculative_generate
from draftsmith.decode.proposers.lookahead import LookaheadProposer
from draftsmith.decode.proposers.prompt_lookup import PromptLookupProposer


def prompt(seed: int, length: int = 7) -> torch.Tensor:
    """A prompt that repeats itself, so that there is something to look up."""
    half = torch.randint(1, 97, (1, -(-length // 2)), generator=torch.Generator().manual_seed(seed))
    return half.repeat(1, 2)[:, :length]


def stepping(step: int, size: int) -> torch.nn.Module:
    """A model that writes (x + step) mod size after x at T=0: its text repeats itself after `size` tokens."""
    model = tiny_llama(0, size)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    tokens = torch.arange(size)
    model.model.embed_tokens.weight.zero_()[tokens, tokens] = 1.0
    model.lm_head.weight.zero_()[(tokens + step) % size, tokens] = 1.0
    return model


@pytest.mark.parametrize(
    "proposer",
    [PromptLookupProposer(), LookaheadProposer(), LookaheadProposer(ngram=5, guesses=2)],
    ids=["lookup", "lookahead", "longer lookahead"],
)
def test_a_looping_text_is_drafted_well(proposer):
    model, ids = stepping(7, 31), torch.tensor([[3]])
    out = speculative_generate(model, proposer, ids, draft_length=4, max_new_tokens=120, do_sample=False)
    assert out.sequences[0].tolist() == [(3 + 7 * i) % 31 for i in range(121)]
    assert out.counts.mean_acceptance_length() > 1.5, out.counts


def test_lookahead_learns_what_never_stood_in_the_text():
    """The window's N-grams are the target's own: they are accepted where those of prompt and output are not."""

    class TextAlone(LookaheadProposer):
        def commit(self, outcomes):
            self._rows[0].levels = [[0] * self._window] * (self._n - 1)

    model = stepping(7, 31)
    ids = torch.randperm(30, generator=torch.Generator().manual_seed(0))[None, :] + 1
    accepted = {}
    for proposer in (LookaheadProposer(), TextAlone()):
        out = speculative_generate(model, proposer, ids, draft_length=12, max_new_tokens=24, do_sample=False)
        assert out.sequences[0, 29:].tolist() == [(int(ids[0, -1]) + 7 * i) % 31 for i in range(25)]
        accepted[type(proposer)] = out.counts.num_accepted_tokens
    assert accepted[LookaheadProposer] >= 8 and accepted[TextAlone] <= 2, accepted
