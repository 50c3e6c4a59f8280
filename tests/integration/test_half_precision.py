"""bfloat16 and float16: drafters of every kind decode under every rule, and replay takes the target's own text.

At T=0 a text in half precision may part from plain decoding's where two tokens tie; in float32 nothing may.
"""

import copy
from functools import lru_cache

import pytest
import torch
from conftest import perturbed, tiny_llama
from specimens import TREE, case_id, proposer, rotated, shapes, specimen

from draftsmith.decode import (
    Cascade,
    DraftModelProposer,
    Threshold,
    Typical,
    autoregressive_generate,
    replay_acceptance,
    speculative_generate,
)
from draftsmith.decode.measurement.authorship import readmit_ties
from draftsmith.decode.measurement.exactness import first_mismatch
from draftsmith.decode.sampling import Sampler

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
LOSSY = {"typical": Typical(), "threshold": Threshold(0.05), "cascade": Cascade(0.2)}
NEW = 16
SHAPES = shapes()


@lru_cache
def models(dtype: torch.dtype):
    target = tiny_llama(0)
    draft = perturbed(target, 0.05)
    return target.to(dtype), draft.to(dtype)


def prompts(rows: int) -> torch.Tensor:
    half = torch.randint(1, 97, (rows, 4), generator=torch.Generator().manual_seed(0))
    return half.repeat(1, 2)


def prompts_for(kind: str) -> torch.Tensor:
    return prompts(3 if specimen(kind).batched else 1)


@pytest.mark.parametrize(("case", "do_sample", "dtype"), rotated(SHAPES, [False, True], HALVES), ids=case_id)
def test_every_kind_decodes_under_the_exact_rule(case, do_sample, dtype):
    target, _ = models(HALVES[dtype])
    ids = prompts_for(case[0])
    out = speculative_generate(
        target, proposer(*case, target), ids, draft_length=3, max_new_tokens=NEW, do_sample=do_sample
    )
    assert out.counts.num_emitted_tokens == NEW * len(ids)
    if not do_sample:
        plain = autoregressive_generate(target, ids, max_new_tokens=NEW, do_sample=False).sequences
        for text, expected in zip(out.sequences, plain, strict=True):
            mismatch = first_mismatch(target, expected, text, ids.shape[1])
            assert mismatch is None or mismatch.is_tie


@pytest.mark.parametrize(
    ("case", "do_sample", "dtype", "rule"), rotated(SHAPES, [False, True], HALVES, LOSSY), ids=case_id
)
def test_every_kind_decodes_under_lossy_rules(case, rule, do_sample, dtype):
    """Each shape under one rule, and each rule in both dtypes, greedily and under sampling."""
    if rule == "cascade" and not specimen(case[0]).confident:
        rule = "typical"
    target, _ = models(HALVES[dtype])
    ids = prompts_for(case[0])
    out = speculative_generate(
        target, proposer(*case, target), ids, draft_length=3, rule=LOSSY[rule], max_new_tokens=NEW // 2,
        do_sample=do_sample,
    )  # fmt: skip
    assert out.departure.num_tokens == out.counts.num_emitted_tokens == NEW // 2 * len(ids)
    assert out.departure.total_variation >= 0


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_a_draft_in_half_precision_serves_a_target_in_float32(tree, dtype):
    target, draft = models(torch.float32)[0], models(HALVES[dtype])[1]
    plain = autoregressive_generate(target, prompts(3), max_new_tokens=NEW, do_sample=False).sequences
    for do_sample in (False, True):
        out = speculative_generate(
            target, DraftModelProposer(draft, tree), prompts(3), draft_length=3, max_new_tokens=NEW, do_sample=do_sample
        )
        assert out.counts.num_accepted_tokens > 0
        assert do_sample or torch.equal(out.sequences, plain)


@pytest.mark.parametrize(
    ("filters", "dtype"), rotated([{"top_k": 5}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.8}], HALVES)
)
def test_replay_takes_the_targets_own_text(filters, dtype):
    """A token at the cut-off is kept in a forward of one block and cut off in one of the whole text."""
    target, draft = models(HALVES[dtype])
    ids = prompts(48)
    options = {"draft_length": 3, "max_new_tokens": 48, "do_sample": True, "top_k": 0} | filters
    out = speculative_generate(target, DraftModelProposer(draft), ids, **options)
    sequences, prompt_lengths = list(out.sequences), [ids.shape[1]] * len(ids)
    for name in ("draft", "medusa", "prompt_lookup"):
        drafter = proposer(name, "chain", target)
        replay = replay_acceptance(target, drafter, sequences, prompt_lengths, [1, 3], temperature=1.0, **filters)
        assert 0 <= replay.alpha.value <= 1 and replay.num_ties < 0.02 * 48 * len(sequences)
        decoded = replay.mean_acceptance_length[3]
        assert 1 <= decoded.value <= 4


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.7}])
def test_a_token_at_the_edge_is_let_back_in_and_a_foreign_one_is_not(filters):
    sampler = Sampler.of(1.0, **filters)
    # bfloat16: 8 units in the last place of the largest logit, 5, are 0.3125.
    logits = torch.tensor([[5.0, 4.5, 4.0, 3.9, 1.0, 0.0]]).bfloat16()
    contexts = [torch.tensor([1])]

    def scores_with(token: int) -> tuple[int, torch.Tensor]:
        scores = sampler.scores(logits.clone(), contexts)
        return readmit_ties(sampler, logits, scores, torch.tensor([token]), contexts), scores[0]

    for token in (0, 1):
        let_in, scores = scores_with(token)
        assert let_in == 0 and torch.equal(scores, sampler.scores(logits, contexts)[0])
    edge = int(sampler.scores(logits, contexts)[0].isfinite().sum())  # the likeliest token that is cut off
    let_in, scores = scores_with(edge)
    assert let_in == 1 and scores[edge] == scores[edge - 1]
    for token in (4, 5):
        let_in, scores = scores_with(token)
        assert let_in == 0 and scores[token].isneginf()
    exact = copy.deepcopy(logits).float()
    scores = sampler.scores(exact, contexts)
    assert readmit_ties(sampler, exact, scores, torch.tensor([edge]), contexts) == 0  # in float32 that is no tie
