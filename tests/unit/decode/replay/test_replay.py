"""Replay against enumeration, closed forms, and the decoder itself, count for count."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.decode import (
    BlindProposer,
    DraftModelProposer,
    InputError,
    LookaheadProposer,
    PromptLookupProposer,
    Tree,
    autoregressive_generate,
    replay_acceptance,
    speculative_generate,
)
from draftsmith.decode.measurement.replay import TextReplay
from draftsmith.decode.replay.batch_replay import replay_by_position
from draftsmith.decode.replay.rounds import acceptance_probabilities, expected_counts, expected_rounds, overlap
from draftsmith.decode.replay.texts import WrittenText
from draftsmith.train.data.generate import PrepareConfig, load_completions, prepare
from draftsmith.train.models import load_model
from draftsmith.train.runs import save_model


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


@pytest.mark.parametrize(("n", "draft_length"), [(1, 1), (5, 3), (8, 3)])
def test_expected_rounds_is_the_sum_over_all_patterns(n, draft_length):
    a = torch.stack([random_a(n, seed) for seed in range(3)])
    rounds = expected_rounds(a, torch.full((3,), n), draft_length)
    assert rounds.dtype == torch.float64
    for row in range(3):
        # Up to 2^8 products of 8 factors: rounding stays below 1e-13.
        assert float(rounds[row]) == pytest.approx(enumerated(a[row], draft_length), abs=1e-12)


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


def counted(accepted: tuple[int, ...], draft_length: int, limit: int) -> dict[str, list[float]]:
    """What the decoder counts on a text whose drafted token at position i is accepted where `accepted[i]`."""
    n, at = len(accepted), 0
    found = {"accepted": [0.0] * draft_length, "drafted": [0.0] * draft_length, "reached": [0.0] * draft_length}
    while at < n:
        depth = min(draft_length, limit - at - 1)
        taken = 0
        while taken < depth and at + taken < n and accepted[at + taken]:
            taken += 1
        emitted = min(taken + 1, n - at)
        depth = depth if emitted > taken else emitted
        for i in range(depth):
            found["drafted"][i] += 1
            found["accepted"][i] += i < taken
            found["reached"][i] += i <= taken
        at += emitted
    return found


@pytest.mark.parametrize("limit", [6, 7, 20])
@pytest.mark.parametrize("draft_length", [1, 4, 8])
def test_expected_counts_are_the_sums_over_all_patterns(limit, draft_length):
    """A text that the limit ended (6), and texts that ended before: their last rounds may have drafted past the end."""
    n, a = 6, random_a(6, limit)
    total = {name: [0.0] * draft_length for name in ("accepted", "drafted", "reached")}
    for accepted in product((0, 1), repeat=n):
        mass = math.prod(float(x) if kept else 1 - float(x) for x, kept in zip(a, accepted, strict=True))
        for name, values in counted(accepted, draft_length, limit).items():
            total[name] = [x + mass * y for x, y in zip(total[name], values, strict=True)]
    windows = torch.nn.functional.pad(a[None], (0, draft_length - 1)).unfold(1, draft_length, 1)
    [found] = expected_counts(windows, torch.tensor([n]), torch.tensor([limit]))
    deep = sum(x > 0 for x in total["drafted"])
    for name, own in (
        ("accepted", found.num_accepted_tokens_per_pos),
        ("drafted", found.num_draft_tokens_per_pos),
        ("reached", found.num_reached_per_pos),
    ):
        assert list(own) == pytest.approx(total[name][:deep], abs=1e-12), name
    assert found.num_accepted_tokens == pytest.approx(sum(total["accepted"]))
    assert found.num_draft_tokens == pytest.approx(sum(total["drafted"]))
    assert found.num_drafts == pytest.approx(enumerated(a, draft_length))


def test_sums_over_stretches_are_those_over_all_patterns():
    """Two drafters that take turns on a text of three stretches, one in two pieces and one of a single token."""
    a, k, n = random_a(7, 0), 3, 7
    sources, labels = [0, 0, 1, 1, 0, 1, 0], [5, 5, 2, 2, 9, 2, 5]
    rounds, taken = torch.zeros(2, n).double(), torch.zeros(2, n).double()
    for accepted in product((0, 1), repeat=n):
        mass = math.prod(float(x) if kept else 1 - float(x) for x, kept in zip(a, accepted, strict=True))
        at = 0
        while at < n:
            block = accepted[at : at + k]
            length = block.index(0) if 0 in block else len(block)
            rounds[sources[at], at] += mass
            taken[sources[at], at : at + length] += mass
            at += length + 1
    text = WrittenText(torch.arange(n + 2), 2, 20)
    chain = replay_by_position([text], [a], [a])
    [found] = replace(chain, sources=[torch.tensor(sources)]).stretches([text], [np.array(labels)], [k])
    of = torch.tensor([[label == wanted for label in labels] for wanted in (2, 5, 9)]).double()
    assert (found.labels.tolist(), found.tokens.tolist(), found.contexts.tolist()) == ([2, 5, 9], [3, 3, 1], [3, 3, 1])
    assert found.overlap.tolist() == pytest.approx((of @ a).tolist())
    assert found.rounds[k].shape == (2, k + 1, 3)  # the text ends far from its limit, so all rounds draft γ tokens
    assert found.rounds[k][:, k].ravel().tolist() == pytest.approx((rounds @ of.T).ravel().tolist())
    assert found.accepted[k].ravel().tolist() == pytest.approx((taken @ of.T).ravel().tolist())
    # All stretches together are the text.
    whole = TextReplay({}, 0.0, 0, (), stretches=found).within([2, 5, 9])
    [counts] = chain.counts(k)
    for name in ("num_drafts", "num_accepted_tokens", "num_emitted_tokens"):
        assert getattr(whole.counts[k], name) == pytest.approx(getattr(counts, name)), name
    assert TextReplay({}, 0.0, 0, (), stretches=found).within([3]) is None


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


NEW = 20
TREE = Tree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)])
PROPOSERS = {
    "draft": lambda draft: DraftModelProposer(draft),
    "tree": lambda draft: DraftModelProposer(draft, tree=TREE),
    "lookup": lambda draft: PromptLookupProposer(),
    "blind": lambda draft: BlindProposer(),
}


@pytest.fixture(scope="module")
def repeating():
    """A target that writes in circles, so that every drafter is right now and then: it knows the last token alone."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    ).eval()
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(0.2)
        model.lm_head.weight.mul_(8)
    model.generation_config.eos_token_id = None
    return model


def near(target, amount: float):
    drafter = LlamaForCausalLM(target.config).eval()
    drafter.load_state_dict(target.state_dict())
    torch.manual_seed(4)
    with torch.no_grad():
        drafter.lm_head.weight.add_(torch.randn_like(drafter.lm_head.weight) * amount)
    return drafter


@pytest.mark.parametrize("name", PROPOSERS)
def test_greedy_replay_is_the_decoder_count_for_count(repeating, name):
    """Half of the texts end before their limit, at a token of their own."""
    proposer = PROPOSERS[name](near(repeating, 0.1))
    prompts = torch.cat([torch.randint(31, (1, 5), generator=torch.Generator().manual_seed(seed)) for seed in range(5)])
    lengths = (1, 2, 4, 7)
    for ended in (False, True):
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        if ended:
            options["eos_token_id"] = [7, 11, 18]
        plain, decoded = autoregressive_generate(repeating, prompts, **options).sequences, {}
        for k in lengths:
            out = speculative_generate(repeating, proposer, prompts, draft_length=k, **options)
            assert torch.equal(out.sequences, plain)
            decoded[k] = out.row_counts
        texts = [text[: 5 + counts.num_emitted_tokens] for text, counts in zip(plain, decoded[1], strict=True)]
        assert ended == any(len(text) < 5 + NEW for text in texts)
        replay = replay_acceptance(
            repeating, proposer, texts, [5] * len(texts), lengths, temperature=0, max_new_tokens=NEW
        )
        accepted = 0
        for k in lengths:
            for text, counts in zip(replay.texts, decoded[k], strict=True):
                found = text.counts[k]
                for field in counts.to_dict():
                    assert getattr(found, field) == getattr(counts, field), (name, ended, k, field)
                accepted += counts.num_accepted_tokens
            total = sum(decoded[k][1:], decoded[k][0])
            assert replay.mean_acceptance_length[k].value == pytest.approx(total.mean_acceptance_length())
            for estimates, ratios in (
                (replay.acceptance_per_position[k], total.acceptance_per_position()),
                (replay.conditional_acceptance[k], total.conditional_acceptance()),
            ):
                assert [e.value for e in estimates] == pytest.approx(ratios)
        assert accepted > 5  # not a comparison of noughts


def test_alpha_at_t0_is_the_share_of_equal_argmaxes(repeating):
    draft = near(repeating, 0.1)
    ids = torch.arange(1, 6)[None]
    text = autoregressive_generate(repeating, ids, max_new_tokens=NEW, do_sample=False).sequences
    with torch.no_grad():
        p, q = (model(text[:, :-1]).logits[0, 4:].argmax(-1) for model in (repeating, draft))
    replay = replay_acceptance(repeating, DraftModelProposer(draft), [text[0]], [5], [2], temperature=0)
    assert replay.alpha.value == pytest.approx(float((p == q).float().mean()))
    assert replay.texts[0].acceptance == tuple((p == q).float().tolist())


@pytest.mark.parametrize(
    ("name", "warped"),
    [
        ("draft", {}),
        ("blind", {}),
        *((name, {"temperature": 0.6, "top_k": 9}) for name in ("draft", "greedy", "lookup")),
    ],
)
def test_sampled_replay_agrees_with_the_decoder(repeating, name, warped):
    """Texts differ between the two ways, so means are compared.

    Over the choice of seeds, a right pair differs by more than 4 standard errors with probability 6e-5 a case.
    """
    samples, k, ends = 150, 3, [3, 25]
    draft = near(repeating, 0.1)
    proposer = DraftModelProposer(draft, greedy=True) if name == "greedy" else PROPOSERS[name](draft)
    sampling = {"temperature": 1.0, "top_k": 0} | warped
    options = {"max_new_tokens": 10, "do_sample": True, "eos_token_id": ends, **sampling}
    ids = torch.cat(
        [torch.randint(31, (1, 5), generator=torch.Generator().manual_seed(i % 15)) for i in range(samples)]
    )
    plain = autoregressive_generate(repeating, ids, **options).sequences
    texts = []
    for row in plain:
        end = next((n for n, token in enumerate(row[5:].tolist(), start=6) if token in ends), 15)
        texts.append(row[:end])
    replay = replay_acceptance(
        repeating, proposer, texts, [5] * samples, [1, k], max_new_tokens=10, top_p=1.0, **sampling
    )
    out = speculative_generate(repeating, proposer, ids, draft_length=k, seed=10_000, **options)
    for what in ("num_drafts", "num_accepted_tokens", "num_draft_tokens"):
        own = torch.tensor([float(getattr(text.counts[k], what)) for text in replay.texts])
        decoded = torch.tensor([float(getattr(counts, what)) for counts in out.row_counts])
        error = (own.var() / samples + decoded.var() / samples) ** 0.5
        difference = own.mean() - decoded.mean()
        assert difference.abs() < 4 * error, f"{what}: {difference:.3f}, standard error {error:.3f}"
    if name == "draft" and not warped:
        # The test has power: replay of another draft length is told apart, and the replayed count varies less.
        shorter = torch.tensor([text.counts[1].num_accepted_tokens for text in replay.texts])
        own = torch.tensor([text.counts[k].num_accepted_tokens for text in replay.texts])
        decoded = torch.tensor([float(counts.num_accepted_tokens) for counts in out.row_counts])
        assert (shorter - decoded).mean().abs() > 4 * ((shorter.var() + decoded.var()) / samples) ** 0.5
        assert own.var() < decoded.var()


def test_what_the_target_did_not_write_is_refused(repeating):
    draft = DraftModelProposer(near(repeating, 0.1))
    ids = torch.arange(1, 6)[None]
    options = {"max_new_tokens": 60, "top_k": 0}
    greedy = autoregressive_generate(repeating, ids, do_sample=False, max_new_tokens=60).sequences[0]
    sampled = autoregressive_generate(repeating, ids, do_sample=True, temperature=1.0, **options).sequences[0]
    hotter = autoregressive_generate(repeating, ids, do_sample=True, temperature=3.0, **options).sequences[0]
    random = torch.cat([ids[0], torch.randint(31, (60,), generator=torch.Generator().manual_seed(0))])
    changed = greedy.clone()
    changed[20] = (changed[20] + 1) % 31

    def replay(*texts, **settings):
        return replay_acceptance(repeating, draft, list(texts), [5] * len(texts), [2], **settings)

    assert not replay(greedy, temperature=0).biased and not replay(sampled).biased
    with pytest.raises(InputError, match="found 1 of 16 tokens that are not the target's argmax, the first at 20"):
        replay(changed[:21], temperature=0)
    with pytest.raises(InputError, match="not the target's argmax"):
        replay(sampled, temperature=0)
    with pytest.raises(InputError, match=r"likelier than its own by .* standard errors"):
        replay(greedy)
    with pytest.raises(InputError, match="less likely than its own"):
        replay(random, torch.cat([ids[0], random[5:].flip(0)]), torch.cat([ids[0], random[5:].roll(7)]))
    with pytest.raises(InputError, match="less likely than its own"):
        replay(hotter, hotter, hotter)
    with pytest.raises(InputError, match="not a token that the target could have drawn"):
        replay(hotter, top_k=2)
    assert replay(random, allow_biased=True).biased


def test_text_that_auto_wrote_is_refused_in_another_dtype(tokenizer, tmp_path, monkeypatch):
    """`prepare` writes in the dtype of the stored weights; in float32 other tokens are the argmax here and there."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    save_model(tiny_llama(0, len(tokenizer), layers=1).to(torch.bfloat16), tokenizer, tmp_path / "target")
    (tmp_path / "prompts.txt").write_text("\n".join(f"def f{i}(x):" for i in range(4)))
    paths = [str(tmp_path / name) for name in ("target", "prompts.txt", "texts")]
    prepare(PrepareConfig(*paths, max_new_tokens=24, temperature=0.0, dtype="auto"))
    rows = load_completions(paths[2]).to_list()
    texts, lengths = [torch.tensor(row["input_ids"]) for row in rows], [row["prompt_length"] for row in rows]

    def replay(dtype: str):
        target = load_model(paths[0], dtype=dtype)
        return replay_acceptance(target, PromptLookupProposer(), texts, lengths, [2], temperature=0.0)

    assert not replay("bfloat16").biased
    with pytest.raises(InputError, match=r"found \d+ of 24 tokens that are not the target's argmax"):
        replay("float32")


def test_drafts_that_replay_does_not_apply_to_are_refused(repeating):
    draft, text = near(repeating, 0.1), torch.arange(1, 12)
    for proposer, temperature, said in (
        (LookaheadProposer(), 0.0, "LookaheadProposer"),
        (DraftModelProposer(draft, tree=TREE), 1.0, "found a tree"),
    ):
        with pytest.raises(InputError, match=said):
            replay_acceptance(repeating, proposer, [text], [4], [2], temperature=temperature, allow_biased=True)
    for length, said in ((0, "prompt and a text"), (11, "prompt and a text"), (2, "at most")):
        with pytest.raises(InputError, match=said):
            replay_acceptance(repeating, DraftModelProposer(draft), [text], [length], max_new_tokens=3)
