"""In which families texts keep their hidden states with masks beside them, within sliding windows and far past them."""

import pytest
import torch
from families import tiny_model
from transformers import PreTrainedModel

from draftsmith.decode import ParallelDraftProposer
from draftsmith.decode.errors import InputError
from draftsmith.distill.parallel.chains import make_chains
from draftsmith.distill.parallel.model import parallel_hidden, require_masks
from draftsmith.train.losses.output_head import last_hidden

KEEPS = [
    "llama", "qwen2", "qwen2-window", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "gpt-neox", "phi", "phi3", "opt",
]  # fmt: skip
REFUSED = ["bloom", "mamba", "lfm2"]
MASK, LENGTH = 3, 24


def build(name: str, attention: str) -> PreTrainedModel:
    model = tiny_model(name, attn_implementation=attention)
    model.config.pard_token = MASK
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", KEEPS)
def test_hidden_states_are_those_of_plain_forwards(name, attention):
    if (name, attention) == ("gemma2", "sdpa"):
        pytest.skip("the family has no sdpa")
    model = build(name, attention)
    require_masks(model)
    ids = torch.randint(4, 60, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    flat = torch.arange(2, LENGTH - 1)
    chains = make_chains(flat, ids.shape, torch.full((len(flat),), 3))
    text = torch.arange(LENGTH)[None]
    masks = chains.positions_BM.shape[1]
    with torch.no_grad():
        hidden = parallel_hidden(
            model,
            torch.cat([ids, torch.full((1, masks), MASK)], dim=1),
            torch.cat([text, chains.positions_BM], dim=1),
            torch.cat([text, chains.anchors_BM], dim=1),
        )
        found, at = chains.take(hidden), 0
        for anchor in flat.tolist():
            kept = min(3, LENGTH - 2 - anchor)
            fed = torch.cat([ids[:, : anchor + 1], torch.full((1, kept), MASK)], dim=1)
            # float32: the same sums in other shapes.
            expected = last_hidden(model, input_ids=fed)[0, anchor:]
            assert torch.allclose(found[at : at + 1 + kept], expected, atol=1e-4, rtol=1e-4)
            at += 1 + kept
    assert at == len(found)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_does_not_keep_to_the_mask_is_refused(name):
    model = build(name, "eager").train()
    for refuse in (require_masks, ParallelDraftProposer):
        with pytest.raises(
            InputError, match=f"^parallel draft: expected layers with attention alone, found {type(model).__name__}"
        ):
            refuse(model)
    assert model.training
