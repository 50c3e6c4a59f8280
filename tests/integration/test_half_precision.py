"""bfloat16 and float16: every proposer under every rule decodes, and replay takes the target's own text.

At T=0 a text in half precision may part from plain decoding's where two tokens tie; in float32 nothing may.
"""

import copy
from functools import lru_cache

import pytest
import torch
from conftest import perturbed, tiny_llama

from draftsmith.decode import (
    BlindProposer,
    Cascade,
    DraftModelProposer,
    DynamicTree,
    LookaheadProposer,
    PromptLookupProposer,
    RunAheadProposer,
    Threshold,
    Tree,
    Typical,
    autoregressive_generate,
    early_exit,
    replay_acceptance,
    speculative_generate,
)
from draftsmith.decode.measurement.authorship import readmit
from draftsmith.decode.measurement.exactness import first_mismatch
from draftsmith.decode.sampling import Sampler
from draftsmith.medusa import MedusaHeads, MedusaProposer

TREE = Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PROPOSERS = {
    "chain": lambda target, draft: DraftModelProposer(draft),
    "greedy chain": lambda target, draft: DraftModelProposer(draft, greedy=True),
    "tree": lambda target, draft: DraftModelProposer(draft, TREE),
    "dynamic tree": lambda target, draft: DraftModelProposer(draft, DynamicTree(3, 7)),
    "medusa chain": lambda target, draft: MedusaProposer(heads_of(target), Tree.chain(3)),
    "medusa tree": lambda target, draft: MedusaProposer(heads_of(target), TREE),
    "hydra tree": lambda target, draft: MedusaProposer(heads_of(target, hydra=True), TREE),
    "early exit": lambda target, draft: DraftModelProposer(early_exit(target, 1)),
    "lookup": lambda target, draft: PromptLookupProposer(),
    "lookahead": lambda target, draft: LookaheadProposer(),
    "unigram": lambda target, draft: BlindProposer(),
    "run-ahead": lambda target, draft: RunAheadProposer(draft),
}
LOSSY = {"typical": Typical(), "threshold": Threshold(0.05), "cascade": Cascade(0.2)}
# Those that say how sure they are, which Cascade wants to know, and draw no siblings that nobody may verify.
UNSURE = ("lookup", "lookahead", "medusa chain", "medusa tree", "hydra tree")
NEW = 16


@lru_cache
def models(dtype: torch.dtype):
    target = tiny_llama(0)
    draft = perturbed(target, 0.05)
    return target.to(dtype), draft.to(dtype)


def heads_of(target, **options) -> MedusaHeads:
    torch.manual_seed(0)
    heads = MedusaHeads.of_target(target, 3, **options)
    for parameter in heads.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return heads.to(target.dtype)


def prompts(rows: int) -> torch.Tensor:
    half = torch.randint(1, 97, (rows, 4), generator=torch.Generator().manual_seed(0))
    return half.repeat(1, 2)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", PROPOSERS)
def test_every_proposer_decodes_under_the_exact_rule(name, do_sample, dtype):
    target, draft = models(HALVES[dtype])
    ids = prompts(1 if name == "run-ahead" else 3)
    out = speculative_generate(
        target, PROPOSERS[name](target, draft), ids, draft_length=3, max_new_tokens=NEW, do_sample=do_sample
    )
    assert out.counts.num_emitted_tokens == NEW * len(ids)
    if not do_sample:
        plain = autoregressive_generate(target, ids, max_new_tokens=NEW, do_sample=False).sequences
        for text, expected in zip(out.sequences, plain, strict=True):
            mismatch = first_mismatch(target, expected, text, ids.shape[1])
            assert mismatch is None or mismatch.is_tie


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("rule", LOSSY)
@pytest.mark.parametrize("name", PROPOSERS)
def test_every_proposer_decodes_under_lossy_rules(name, rule, do_sample, dtype):
    if rule == "cascade" and name in UNSURE[:2]:
        pytest.skip("n-grams know no confidence")
    target, draft = models(HALVES[dtype])
    ids = prompts(1 if name == "run-ahead" else 3)
    out = speculative_generate(
        target, PROPOSERS[name](target, draft), ids, draft_length=3, rule=LOSSY[rule], max_new_tokens=NEW // 2,
        do_sample=do_sample,
    )  # fmt: skip
    assert out.departure.num_tokens == out.counts.num_emitted_tokens == NEW // 2 * len(ids)
    assert out.departure.total_variation >= 0


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["chain", "tree", "dynamic tree"])
def test_a_draft_in_half_precision_serves_a_target_in_float32(name, dtype):
    target, draft = models(torch.float32)[0], models(HALVES[dtype])[1]
    plain = autoregressive_generate(target, prompts(3), max_new_tokens=NEW, do_sample=False).sequences
    for do_sample in (False, True):
        out = speculative_generate(
            target, PROPOSERS[name](target, draft), prompts(3), draft_length=3, max_new_tokens=NEW, do_sample=do_sample
        )
        assert out.counts.num_accepted_tokens > 0
        assert do_sample or torch.equal(out.sequences, plain)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.8}])
def test_replay_takes_the_targets_own_text(dtype, filters):
    """A token at the cut-off is kept in a forward of one block and cut off in one of the whole text."""
    target, draft = models(HALVES[dtype])
    ids = prompts(48)
    options = {"draft_length": 3, "max_new_tokens": 48, "do_sample": True, "top_k": 0} | filters
    out = speculative_generate(target, DraftModelProposer(draft), ids, **options)
    sequences, prompt_lengths = list(out.sequences), [ids.shape[1]] * len(ids)
    for proposer in (
        DraftModelProposer(draft),
        MedusaProposer(heads_of(target), Tree.chain(3)),
        PromptLookupProposer(),
    ):
        replay = replay_acceptance(target, proposer, sequences, prompt_lengths, [1, 3], temperature=1.0, **filters)
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
        return readmit(sampler, logits, scores, torch.tensor([token]), contexts), scores[0]

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
    assert readmit(sampler, exact, scores, torch.tensor([edge]), contexts) == 0  # in float32 that is no tie
