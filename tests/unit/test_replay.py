"""Replay against enumeration, closed forms, and the decoder itself."""

import math
from itertools import product

import pytest
import torch
from conftest import tiny_llama
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from draftsmith.decode import DraftModelProposer, autoregressive_generate, speculative_generate
from draftsmith.decode.replay import ReplayedText, acceptance_probabilities, expected_rounds, overlap, replay_text
from draftsmith.decode.sampling import Law

GREEDY = Law(LogitsProcessorList(), do_sample=False)


def rounds_of(accepted: tuple[int, ...], draft_length: int) -> int:
    """The rounds of a text whose drafted token at position i is accepted where `accepted[i]`: as the decoder goes."""
    at, rounds = 0, 0
    while at < len(accepted):
        block = accepted[at : at + draft_length]
        at += (block.index(0) if 0 in block else len(block)) + 1
        rounds += 1
    return rounds


def enumerated(a: torch.Tensor, draft_length: int) -> float:
    total = 0.0
    for accepted in product((0, 1), repeat=len(a)):
        mass = math.prod(float(x) if kept else 1 - float(x) for x, kept in zip(a, accepted, strict=True))
        total += mass * rounds_of(accepted, draft_length)
    return total


def random_a(n: int, seed: int) -> torch.Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("draft_length", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_expected_rounds_is_the_sum_over_all_patterns(n, draft_length):
    a = torch.stack([random_a(n, seed) for seed in range(3)])
    rounds = expected_rounds(a, torch.full((3,), n), draft_length)
    assert rounds.dtype == torch.float64
    for row in range(3):
        # Up to 2^8 products of 8 factors: rounding stays below 1e-13.
        assert float(rounds[row]) == pytest.approx(enumerated(a[row], draft_length), abs=1e-12)


@pytest.mark.parametrize("draft_length", [1, 2, 4, 8])
def test_closed_forms(draft_length):
    for n in (1, 4, 5, 9, 40):
        lengths = torch.tensor([n])
        assert float(expected_rounds(torch.ones(1, n), lengths, draft_length)) == math.ceil(n / (draft_length + 1))
        assert float(expected_rounds(torch.zeros(1, n), lengths, draft_length)) == n


def test_the_last_token_and_what_lies_past_a_text_change_nothing():
    a = random_a(6, 0)[None, :]
    changed = torch.cat([a[:, :5], 1 - a[:, 5:], torch.full((1, 3), float("nan"), dtype=torch.float64)], dim=1)
    # A round from the last token emits that token whether its draft is accepted or not.
    assert torch.equal(expected_rounds(a, torch.tensor([6]), 3), expected_rounds(changed[:, :6], torch.tensor([6]), 3))
    padded = torch.cat([a, torch.ones(1, 3, dtype=torch.float64)], dim=1)
    assert torch.equal(expected_rounds(a, torch.tensor([6]), 3), expected_rounds(padded, torch.tensor([6]), 3))


@pytest.mark.parametrize("draft_length", [1, 3, 7])
def test_ragged_rows_are_as_alone(draft_length):
    lengths = (1, 9, 4, 6)
    a = torch.stack([random_a(9, seed) for seed in range(4)])
    rounds = expected_rounds(a, torch.tensor(lengths), draft_length)
    for row, n in enumerate(lengths):
        alone = expected_rounds(a[row : row + 1, :n], torch.tensor([n]), draft_length)
        assert float(rounds[row]) == pytest.approx(float(alone), abs=1e-14)
        assert float(rounds[row]) == ReplayedText(a[row, :n], a[row, :n]).rounds(draft_length)


def test_acceptance_probability_is_q_over_p_of_the_token_that_stands():
    p, q = torch.tensor([[0.5, 0.3, 0.2]] * 3), torch.tensor([[0.1, 0.6, 0.3]] * 3)
    a = acceptance_probabilities(p, q, torch.tensor([0, 1, 2]))
    assert torch.allclose(a, torch.tensor([0.2, 1.0, 1.0]))
    # Averaged over texts of law p it is the overlap: Σ_x p(x) min(1, q(x)/p(x)) = Σ_x min(p, q).
    assert float(p[0] @ a) == pytest.approx(float(overlap(p, q)[0]))


def test_one_hot_laws_accept_or_reject_for_certain():
    one_hot = torch.eye(4)
    tokens = torch.tensor([2, 2, 0])
    drafted = torch.tensor([2, 1, 0])
    a = acceptance_probabilities(one_hot[tokens], one_hot[drafted], tokens)
    assert a.tolist() == [1.0, 0.0, 1.0]
    assert overlap(one_hot[tokens], one_hot[drafted]).tolist() == [1.0, 0.0, 1.0]
    # A deterministic proposal of a sampled text: it was accepted wherever it names the token.
    p = torch.full((3, 4), 0.25)
    assert acceptance_probabilities(p, one_hot[drafted], tokens).tolist() == [1.0, 0.0, 1.0]


def test_overlap_is_one_minus_total_variation():
    p, q = (torch.rand(5, 7, generator=torch.Generator().manual_seed(s)).softmax(-1) for s in (0, 1))
    assert torch.allclose(overlap(p, q), 1 - 0.5 * (p - q).abs().sum(-1))
    assert torch.allclose(overlap(p, p), torch.ones(5))


def prompt(seed: int, length: int = 7) -> torch.Tensor:
    return torch.randint(1, 97, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("ended", [False, True])
def test_greedy_replay_is_the_decoders_count_of_rounds(target, draft, ended):
    lengths = set()
    for seed in range(10):
        ids = prompt(seed)
        options = {"max_new_tokens": 24, "do_sample": False}
        plain = autoregressive_generate(target, ids, **options).sequences
        if ended:
            # An end token at another depth for each prompt; it may have occurred before.
            options["eos_token_id"] = int(plain[0, 7 + 2 * seed])
            plain = autoregressive_generate(target, ids, **options).sequences
            assert plain.shape[1] <= 7 + 2 * seed + 1
        lengths.add(plain.shape[1] - 7)
        replayed = replay_text(target, draft, plain[0], 7, GREEDY)
        assert len(replayed.acceptance) == plain.shape[1] - 7
        for draft_length in (1, 2, 4, 8):
            out = speculative_generate(target, DraftModelProposer(draft), ids, draft_length=draft_length, **options)
            assert torch.equal(out.sequences, plain)
            assert replayed.rounds(draft_length) == out.counts.num_drafts
        if not ended:  # the pair agrees sometimes: neither bound is trivial
            assert 24 / 9 <= replayed.rounds(8) <= 24
    assert len(lengths) > 4 or not ended


def test_greedy_replay_takes_the_texts_word_for_what_the_target_chose(target, draft):
    """Half precision can break a near-tie the other way in a parallel forward: here every token is another than its."""
    text = torch.cat([prompt(0), prompt(1, 20)], dim=1)[0]
    with torch.no_grad():
        text[10] = draft(text[None, :10]).logits[0, -1].argmax()  # and one that the draft would have said
        choices = draft(text[None, :-1]).logits[0, 6:].argmax(-1)
    replayed = replay_text(target, draft, text, 7, GREEDY)
    assert torch.equal(replayed.acceptance, (choices == text[7:]).float())
    assert torch.equal(replayed.overlap, replayed.acceptance)
    assert replayed.acceptance[3] == 1 and replayed.acceptance.sum() < 5


@pytest.mark.parametrize("kwargs", [{}, {"temperature": 0.6, "top_k": 12}])
def test_sampled_replay_agrees_with_the_decoder(kwargs):
    """Texts differ between the two ways, so means are compared.

    Over the choice of seeds, a right pair differs by more than 4 standard errors with probability 6e-5 a case.
    """
    target, samples, draft_length = tiny_llama(0, layers=1), 150, 3
    drafter = noisy(target)
    warpers = LogitsProcessorList()
    if kwargs:
        warpers.extend([TemperatureLogitsWarper(kwargs["temperature"]), TopKLogitsWarper(kwargs["top_k"])])
    law, proposer = Law(warpers, do_sample=True), DraftModelProposer(drafter)
    options = {"max_new_tokens": 10, "do_sample": True, "eos_token_id": [3, 50, 77], **({"top_k": 0} | kwargs)}
    ids = torch.cat([prompt(i % 15, 5) for i in range(samples)])
    plain = autoregressive_generate(target, ids, **options).sequences
    replayed, shorter, decoded = [], [], []
    for i, row in enumerate(plain):
        end = next((n for n, token in enumerate(row[5:].tolist(), start=6) if token in options["eos_token_id"]), 15)
        text = replay_text(target, drafter, row[:end], 5, law)
        replayed.append(text.rounds(draft_length))
        shorter.append(text.rounds(1))
        out = speculative_generate(
            target, proposer, ids[i : i + 1], draft_length=draft_length, seed=10_000 + i, **options
        )
        decoded.append(float(out.counts.num_drafts))
    replayed, shorter, decoded = (torch.tensor(x) for x in (replayed, shorter, decoded))
    error = (replayed - decoded).std() / samples**0.5
    assert (replayed - decoded).mean().abs() < 4 * error, f"{(replayed - decoded).mean():.3f}, se {error:.3f}"
    # The test has power: replay of another draft length is told apart.
    assert (shorter - decoded).mean().abs() > 4 * error
    # Rao–Blackwell: the replayed count varies less over texts than the decoder's own.
    assert replayed.var() < decoded.var()


def noisy(target):
    """A draft that is right often enough that the rounds depend on how it is warped."""
    drafter = tiny_llama(0, layers=1)
    drafter.load_state_dict(target.state_dict())
    torch.manual_seed(4)
    with torch.no_grad():
        drafter.lm_head.weight.add_(torch.randn_like(drafter.lm_head.weight) * 0.05)
    return drafter
