"""Drafts whose tokenizer has the target's tokens under other ids: the law is the target's."""

from pathlib import Path

import pytest
import torch
from conftest import perturbed, tiny_llama
from transformers import PreTrainedModel
from unit.decode.proposers.test_renumbered import permuted

from draftsmith.decode import Counts, DraftModelProposer, Tree, speculative_generate
from draftsmith.decode.proposers.renumbered import matching_ids, renumber_draft, stand_in

ASSETS = Path(__file__).parents[2] / "assets"
PROMPTS = ["def add(a, b):\n", "class", "x = '😀' # 你"]


def with_ids(model: PreTrainedModel, new: list[int]) -> PreTrainedModel:
    """Return a copy of a model whose token i has become new[i]."""
    copy = type(model)(model.config).eval().requires_grad_(False)
    order = torch.tensor(new).argsort()
    for weight in ("model.embed_tokens.weight", "lm_head.weight"):
        assert model.state_dict()[weight].shape[0] == len(new)
    rows = {k: w[order] if w.shape[0] == len(new) else w for k, w in model.state_dict().items()}
    copy.load_state_dict(rows)
    return copy


def renumbered(model: PreTrainedModel, tokenizer, tree=None) -> DraftModelProposer:
    other, new = permuted(tokenizer)
    return DraftModelProposer(
        renumber_draft(with_ids(model, new), matching_ids(other, tokenizer), stand_in(other)), tree
    )


def batch(tokenizer, prompts: list[str]) -> dict[str, torch.Tensor]:
    encoded = tokenizer(prompts, return_tensors="pt", padding=True)
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


@pytest.fixture(scope="module")
def target(tokenizer):
    return tiny_llama(0, len(tokenizer))


def test_the_targets_permuted_copy_is_always_accepted(tokenizer, target):
    proposer = renumbered(target, tokenizer)
    for do_sample in (False, True):
        out = speculative_generate(
            target, proposer, **batch(tokenizer, PROMPTS[:1]), draft_length=4, max_new_tokens=40, do_sample=do_sample
        )
        assert out.counts == Counts(8, 32, 32, (8,) * 4, (8,) * 4, (8,) * 4, 40)


@pytest.mark.parametrize("tree", [None, Tree.from_choices([(0,), (1,), (0, 0), (0, 1)])])
def test_a_permuted_draft_does_what_the_draft_does(tokenizer, target, tree):
    """Token for token and count for count, at T=0 and under sampling, alone and in a batch."""
    draft = perturbed(target, 0.05)
    both = (DraftModelProposer(draft, tree), renumbered(draft, tokenizer, tree))
    warping = {"do_sample": True, "temperature": 0.9, "top_k": 40, "no_repeat_ngram_size": 3}
    for options in ({"do_sample": False}, {"do_sample": True}, warping):
        plain, mapped = (
            speculative_generate(target, proposer, **batch(tokenizer, PROMPTS), max_new_tokens=16, seed=3, **options)
            for proposer in both
        )
        assert torch.equal(plain.sequences, mapped.sequences)
        assert plain.row_counts == mapped.row_counts
        assert 0 < plain.counts.num_accepted_tokens < plain.counts.num_draft_tokens
