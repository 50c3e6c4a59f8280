"""Replay of EAGLE-3 heads, which must give what the decoder counts."""

import pytest
import torch
from conftest import tiny_llama
from trained_eagle import train_eagle

from draftsmith.decode import (
    DynamicTree,
    InputError,
    Tree,
    autoregressive_generate,
    replay_acceptance,
    speculative_generate,
)
from draftsmith.decode.replay import texts
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.proposer import EagleProposer

VOCAB = 13
NEW = 24
BUSHY = Tree.from_choices(
    [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2), (0, 0, 0), (0, 0, 1), (2, 2, 0)]
)
KINDS = {
    "plain": {},
    "cut": {"token_map": torch.tensor([0, 1, 2, 4, 5, 7, 8, 11])},
    "normed": {"norm_output": True, "norm_before_residual": True, "fc_norm": True},
    "windowed": {"sliding_window": 5},
}


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(texts, "LOGITS_AT_A_TIME", 5 * 13)


@pytest.fixture(scope="module")
def target():
    return tiny_llama(4, VOCAB, layers=4, scale=8.0)


@pytest.fixture(scope="module")
def heads(target):
    prompts = torch.randint(VOCAB, (24, 3), generator=torch.Generator().manual_seed(2))
    ways = ({"do_sample": False}, {"do_sample": True, "top_k": 0})
    texts = torch.cat([autoregressive_generate(target, prompts, max_new_tokens=NEW, **way).sequences for way in ways])
    made = {}
    for name, options in KINDS.items():
        torch.manual_seed(0)
        made[name] = train_eagle(
            target, EagleHeads.of_target(target, **options), list(texts), steps=25, rate=1e-2, depth=1
        )
    return made


def prompts_of(count):
    return torch.randint(VOCAB, (count, 4), generator=torch.Generator().manual_seed(6))


def counts_of(counts):
    fields = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens", "num_draft_tokens_per_pos",
              "num_accepted_tokens_per_pos")  # fmt: skip
    return [getattr(counts, field) for field in fields]


@pytest.mark.parametrize("shape", ["chain", "bushy"])
@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_the_decoders_at_temperature_zero(target, heads, kind, shape):
    """Integers, on 20 texts at γ 1 … 8; of a tree as deep as it goes."""
    proposer = EagleProposer(heads[kind], BUSHY if shape == "bushy" else None)
    gammas = range(1, 9 if shape == "chain" else 4)
    options = {"max_new_tokens": NEW, "eos_token_id": 9}
    ids = prompts_of(20)
    decoded = {g: speculative_generate(target, proposer, ids, draft_length=g, **options) for g in gammas}
    sequences, ended = [], 0
    for row in decoded[1].sequences:
        end = next((n for n, token in enumerate(row.tolist()) if n > 3 and token == 9), len(row) - 1) + 1
        sequences.append(row[:end])
        ended += end < len(row)
    assert 0 < ended < 20
    replayed = replay_acceptance(target, proposer, sequences, [4] * 20, gammas, temperature=0, max_new_tokens=NEW)
    for gamma, out in decoded.items():
        for text, counts in zip(replayed.texts, out.row_counts, strict=True):
            assert counts_of(text.counts[gamma]) == counts_of(counts)
    assert 0.1 < decoded[3].counts.draft_acceptance_rate() < 0.9 or shape == "bushy"
    assert len(decoded[3].counts.num_accepted_tokens_per_pos) == 3


@pytest.mark.parametrize("kwargs", [{}, {"temperature": 0.6, "top_k": 6}])
def test_sampled_replay_agrees_with_the_decoder(target, heads, kwargs):
    """Means over other texts: off by more than 4 standard errors with a probability of 3e-4 at most, over seeds."""
    samples, depth = 150, 3
    proposer, ids = EagleProposer(heads["cut"]), prompts_of(samples)
    options = {"max_new_tokens": 12, "do_sample": True, "top_k": 0, **kwargs}
    plain = autoregressive_generate(target, ids, **options).sequences
    out = speculative_generate(target, proposer, ids, draft_length=depth, seed=10_000, **options)
    replayed = replay_acceptance(
        target, proposer, list(plain), [4] * samples, [1, depth], max_new_tokens=12,
        **{name: kwargs[name] for name in ("temperature", "top_k") if name in kwargs},
    )  # fmt: skip

    def numbers(counts):
        per_position = list(counts.num_accepted_tokens_per_pos)
        return [float(counts.num_drafts), *per_position, *[0.0] * (depth - len(per_position))]

    expected = torch.tensor([numbers(text.counts[depth]) for text in replayed.texts])
    decoded = torch.tensor([numbers(counts) for counts in out.row_counts])
    error = ((expected.var(0) + decoded.var(0)) / samples).sqrt()
    difference = (expected.mean(0) - decoded.mean(0)).abs()
    assert (difference < 4 * error).all(), f"{difference.tolist()}, standard errors {error.tolist()}"
    assert decoded[:, 1].mean() > 0.5 and decoded[:, 3].sum() > 10
    # The test has power: replay of another draft length is told apart.
    shorter = torch.tensor([text.counts[1].num_drafts for text in replayed.texts])
    assert (shorter.mean() - decoded[:, 0].mean()).abs() > 4 * error[0]


@pytest.mark.parametrize(
    ("shape", "temperature", "said"), [(DynamicTree(), 0, "drafts of one shape"), (BUSHY, 1, "chains under sampling")]
)
def test_drafts_that_cannot_be_replayed_are_refused(target, heads, shape, temperature, said):
    with pytest.raises(InputError, match=said):
        replay_acceptance(
            target, EagleProposer(heads["plain"], shape), [prompts_of(1)[0]], [2], [2], temperature=temperature
        )
