"""Replay of Medusa heads against brute force and against the decoder's own counts."""

from itertools import product

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from trained_heads import train_heads
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from draftsmith.decode import autoregressive_generate, speculative_generate
from draftsmith.decode.errors import InputError
from draftsmith.decode.replay import texts
from draftsmith.decode.replay.ranks import NONE, TextRanks, ranks_of
from draftsmith.decode.replay.rounds import expected_rounds_of_starts
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import Tree
from draftsmith.medusa import MedusaHeads, MedusaProposer
from draftsmith.medusa.heads.replay import replay_heads, replay_ranks, text_states

PROMPT, NEW = 6, 24
TREES = {
    "chain of 1": Tree.chain(1),
    "chain of 3": Tree.chain(3),
    "wide": Tree.from_choices([(0,), (1,), (2,), (3,), (4,)]),
    "bushy": Tree.from_choices(
        [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2), (0, 0, 0), (0, 0, 1), (2, 2, 0)]
    ),
    # Its nodes are not numbered by depth.
    "depth first": Tree((-1, 0, 1, 1, 0, -1, 5, 6)),
}


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(texts, "LOGITS_AT_A_TIME", 5 * 13)


def rounds_of(accepts, depth: int) -> int:
    """The rounds of a text in which a round from t accepts the token at t + j where `accepts[t][j]`."""
    at, rounds = 0, 0
    while at < len(accepts):
        block = list(accepts[at][:depth])
        at += (block.index(0) if 0 in block else depth) + 1
        rounds += 1
    return rounds


@pytest.mark.parametrize(("n", "depth"), [(1, 2), (3, 1), (4, 2), (3, 3), (5, 2)])
def test_rounds_of_starts_is_the_sum_over_all_patterns(n, depth):
    a = torch.rand(n, depth, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    total = 0.0
    for pattern in product((0, 1), repeat=n * depth):
        accepts = torch.tensor(pattern).view(n, depth)
        mass = torch.where(accepts.bool(), a, 1 - a).prod()
        total += float(mass) * rounds_of(accepts.tolist(), depth)
    found = expected_rounds_of_starts(a[None], torch.tensor([n]))
    # Up to 2^10 products of 10 factors: rounding stays below 1e-12.
    assert float(found) == pytest.approx(total, abs=1e-12)
    if depth > 1:
        cut = expected_rounds_of_starts(a[None, :, :1], torch.tensor([n]))
        assert torch.equal(cut, expected_rounds_of_starts(a[None], torch.tensor([n]), 1))


def test_ranks_are_cut_and_what_cannot_be_drafted_has_none():
    scores = torch.tensor([[0.1, 3.0, -float("inf"), 2.0, 1.0]]).expand(5, 5)
    tokens = torch.arange(5)
    assert ranks_of(scores, tokens, 5).tolist() == [3, 0, NONE, 1, 2]
    assert ranks_of(scores, tokens, 99).tolist() == [3, 0, NONE, 1, 2]
    assert ranks_of(scores, tokens, 2).tolist() == [NONE, 0, NONE, 1, NONE]
    assert ranks_of(scores, tokens, 1).dtype == torch.int16


@pytest.fixture(scope="module")
def repeating():
    """A target whose greedy text repeats itself, with a small vocabulary: any heads agree with it now and then."""
    return tiny_llama(2, vocab_size=13, layers=1)


def agreeing_heads(target, **options) -> MedusaHeads:
    """Heads that are right now and then."""
    texts = autoregressive_generate(target, prompt(7, 24), max_new_tokens=NEW, do_sample=False).sequences
    return train_heads(target, MedusaHeads.of_target(target, 3, **options), list(texts), steps=3)


def prompt(seed: int, rows: int = 1, vocab_size: int = 13) -> torch.Tensor:
    return torch.randint(1, vocab_size, (rows, PROMPT), generator=torch.Generator().manual_seed(seed))


def test_where_a_text_may_end_every_cut_of_the_draft_is_the_decoders(repeating):
    """Every end token that its text has, and length limits at and around it."""
    heads, depths = agreeing_heads(repeating), set()
    for seed, tree in enumerate((TREES["bushy"], TREES["depth first"], TREES["wide"])):
        ids = prompt(seed)
        plain = autoregressive_generate(repeating, ids, max_new_tokens=12, do_sample=False).sequences[0, PROMPT:]
        for eos in set(plain.tolist()):
            for limit in (1, 2, 3, 4, 7, 12):
                options = {"max_new_tokens": limit, "do_sample": False, "eos_token_id": eos}
                proposer = MedusaProposer(heads, tree)
                out = speculative_generate(repeating, proposer, ids, draft_length=tree.depth, **options)
                ranks = replay_ranks(repeating, heads, out.sequences[0], PROMPT, most=6, limit=limit)
                assert ranks.counts(tree) == out.counts, (seed, eos, limit)
                depths |= {len(out.counts.num_draft_tokens_per_pos)}
    assert depths == {0, 1, 2, 3}


def test_ties_are_broken_as_the_drafter_breaks_them(repeating):
    """All but three tokens have the same logits, exactly: of `topk` the order among them depends on k."""
    heads = agreeing_heads(repeating)
    with torch.no_grad():
        for own in heads.all_lm_heads:
            own.weight[3:] = 0.0
    tree = TREES["bushy"]
    tied = 0
    for seed in range(4):
        ids = prompt(seed)
        out = speculative_generate(
            repeating, MedusaProposer(heads, tree), ids, draft_length=3, max_new_tokens=NEW, do_sample=False
        )
        ranks = replay_ranks(repeating, heads, out.sequences[0], PROMPT, most=(3, 3, 2))
        assert ranks.counts(tree) == out.counts
        tied += int(((ranks.ranks < NONE) & (out.sequences[0, PROMPT:].numpy()[:, None] >= 3)).sum())
    assert tied > 0


def test_processors_that_look_at_the_text_are_heard(repeating):
    heads, tree = agreeing_heads(repeating), TREES["bushy"]
    ids = prompt(0)
    options = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.7}
    out = speculative_generate(repeating, MedusaProposer(heads, tree), ids, draft_length=3, **options)
    sampler = Sampler(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)]), do_sample=False)
    ranks = replay_ranks(repeating, heads, out.sequences[0], PROMPT, sampler)
    assert ranks.counts(tree) == out.counts
    assert (replay_ranks(repeating, heads, out.sequences[0], PROMPT).ranks != ranks.ranks).any()


@pytest.mark.parametrize("hydra", [False, True])
def test_ranks_and_laws_are_those_of_a_loop_over_starts(repeating, hydra):
    """The slow reference: one head, one start at a time, from the definition."""
    heads, sampler = agreeing_heads(repeating, hydra=hydra), Sampler.of(0.7)
    text = autoregressive_generate(repeating, prompt(1), max_new_tokens=9, do_sample=False).sequences[0]
    ranks = replay_ranks(repeating, heads, text, PROMPT, most=13, limit=30).ranks
    replayed = replay_heads(repeating, heads, text, PROMPT, sampler, limit=30)
    with torch.no_grad():
        output = repeating(text[None], output_hidden_states=True)
        hidden, embeddings = output.hidden_states[-1][0], repeating.get_input_embeddings()(text)
        for start in range(9):
            for i in range(3):
                at = PROMPT + start + i
                if start == 0 or start + i >= 9:
                    assert ranks[start, i] == NONE and replayed.acceptance[start, i] == 0
                    assert not replayed.drafted[start, i]
                    continue
                seen = embeddings[PROMPT + start - 1 : PROMPT + start + i]
                logits = heads.logits(i, hidden[PROMPT + start - 2], seen if hydra else None)
                assert ranks[start, i] == (logits > logits[text[at]]).sum()
                p, q = sampler.probabilities(output.logits[0, at - 1][None], [])[0], (logits / 0.7).softmax(-1)
                expected = float((q[text[at]] / p[text[at]]).clamp(max=1))
                # Float32 forwards of other shapes round their sums in another order.
                assert float(replayed.acceptance[start, i]) == pytest.approx(expected, rel=1e-4)
                assert float(replayed.overlap[start, i]) == pytest.approx(float(torch.minimum(p, q).sum()), rel=1e-4)


def test_what_replay_cannot_answer_is_refused(repeating):
    ranks = TextRanks(np.zeros((9, 2), dtype=np.int16), (3, 1), 9)
    with pytest.raises(InputError, match=r"^tree: expected a depth up to the 2 heads, found 3$"):
        ranks.rounds(Tree.chain(3))
    with pytest.raises(InputError, match=r"^tree: expected at most 1 siblings at depth 2.*found 2$"):
        ranks.rounds(Tree.from_choices([(0,), (0, 0), (0, 1)]))
    assert ranks.starts(Tree.from_choices([(0,), (1,), (2,), (0, 0)])) == [0, 3, 6]
    for length in (0, 5):
        with pytest.raises(InputError, match=r"^sequence: expected a prompt and a text"):
            text_states(repeating, torch.arange(5), length)
