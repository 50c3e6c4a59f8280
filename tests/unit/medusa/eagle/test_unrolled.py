"""The steps of all rounds at once are those of a decoder that begins a round at each place."""

import pytest
import torch
from conftest import tiny_llama

from draftsmith.decode.cache.features import collect_features
from draftsmith.medusa import round_attention
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.target_states import KeysValues

VOCAB, STEPS = 31, 4
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
"""Norms compute in float32, whatever the rest does."""


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0, VOCAB, layers=4)


def heads_of(target, **options) -> EagleHeads:
    torch.manual_seed(1)
    heads = EagleHeads.of_target(target, **options).double()
    with torch.no_grad():  # far from 0, so that no key is seen in vain
        for parameter in heads.midlayer.self_attn.parameters():
            parameter.mul_(20)
    return heads


def seen_of(target, heads: EagleHeads, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings and features of all places but the last token's, (B, T, …), in float64."""
    with torch.no_grad(), collect_features(target, heads.layer_ids) as features:
        target(ids[:, :-1])
        return target.get_input_embeddings()(ids[:, 1:]).double(), features[0].double()


def of_one_round(heads: EagleHeads, embeddings: torch.Tensor, features: torch.Tensor, start: int) -> list[torch.Tensor]:
    """What a decoder computes: features up to a place, then its own states token by token."""
    states, positions = heads.fuse(features[:, : start + 1]), torch.arange(embeddings.shape[1])[None]
    step = heads(embeddings[:, : start + 1], states, positions[:, : start + 1])
    before, hidden = step.own, [step.hidden[:, -1]]
    for index in range(start + 1, min(start + STEPS, embeddings.shape[1])):
        at = slice(index, index + 1)
        seen = index - torch.arange(index + 1) < (heads.config.sliding_window or VOCAB)
        step = heads(embeddings[:, at], step.states[:, -1:], positions[:, at], before, seen[None, None, None])
        before = KeysValues(*(torch.cat(pair, 2) for pair in zip(before, step.own, strict=True)))
        hidden.append(step.hidden[:, -1])
    return hidden


@pytest.mark.parametrize(
    "options",
    [{}, {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}, {"fc_norm": True},
     {"num_key_value_heads": 1}, {"sliding_window": 1}, {"sliding_window": 2}, {"sliding_window": 5}],
)  # fmt: skip
def test_each_round_is_what_a_decoder_computes(target, options):
    heads = heads_of(target, **options)
    embeddings, features = seen_of(target, heads, torch.randint(VOCAB, (2, 10)))
    steps = heads.unroll(embeddings, features, torch.arange(9).expand(2, 9), STEPS)
    assert [step.shape[1] for step in steps] == [9, 8, 7, 6]
    for start in range(9):
        for k, expected in enumerate(of_one_round(heads, embeddings, features, start)):
            torch.testing.assert_close(steps[k][:, start], expected, **CLOSE)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}])
def test_gradients_are_those_of_the_rounds_one_by_one(target, options, checkpointing):
    heads = heads_of(target, **options)
    embeddings, features = seen_of(target, heads, torch.randint(VOCAB, (1, 7)))
    weights = torch.randn(STEPS, 6, heads.config.hidden_size, dtype=torch.float64)

    def gradients(hidden: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        total = sum((weights[k, s] * h).sum() for s, steps in enumerate(hidden) for k, h in enumerate(steps))
        return torch.autograd.grad(total, [p for name, p in heads.named_parameters() if "lm_head" not in name])

    one_by_one = gradients([of_one_round(heads, embeddings, features, start) for start in range(6)])
    if checkpointing:  # each step is computed again in the backward, when there are later ones
        heads.train().activation_checkpointing_enable({"use_reentrant": False})
    steps = heads.unroll(embeddings, features, torch.arange(6)[None], STEPS)
    at_once = [[step[:, s] for step in steps if s < step.shape[1]] for s in range(6)]
    # Sums of float32 norms' gradients, over all rounds.
    torch.testing.assert_close(gradients(at_once), one_by_one, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_window_is_none_in_shorter_texts(target):
    """In longer ones the layer sees as many positions as it says, by an explicit mask."""
    plain, windowed = heads_of(target), heads_of(target, sliding_window=9)
    embeddings, features = seen_of(target, plain, torch.randint(VOCAB, (1, 13)))
    for length in (6, 12):
        given = [part[:, :length] for part in (embeddings, features)]
        whole, narrow = (heads.unroll(*given, torch.arange(length)[None], STEPS) for heads in (plain, windowed))
        equal = [torch.equal(a, b) for a, b in zip(whole, narrow, strict=True)]
        assert equal == [length == 6] * STEPS
        order = torch.arange(length)
        mask = (order[:, None] >= order) & (order[:, None] - order < 9)
        step = plain(embeddings[:, :length], plain.fuse(features[:, :length]), order[None], None, mask[None, None])
        torch.testing.assert_close(narrow[0], step.hidden, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("window", [1, 2, 5, 40])
def test_windows_are_computed_a_few_queries_at_a_time(window, monkeypatch):
    monkeypatch.setattr(round_attention, "CHUNK", 3)
    queries, keys, values = (torch.randn(2, heads, 11, 8, dtype=torch.float64) for heads in (4, 2, 2))
    distance = torch.arange(11)[:, None] - torch.arange(11)
    mask = (distance >= 0) & (distance < window)
    repeated = (part.repeat_interleave(2, 1) for part in (keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(queries, *repeated, attn_mask=mask)
    for count in (1, 4, 11):  # the last queries, as a cache has them
        found = round_attention.windowed_attention(queries[:, :, -count:], KeysValues(keys, values), window)
        torch.testing.assert_close(found, expected[:, :, -count:], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 3])
def test_some_rounds_are_as_all_of_them(target, window):
    heads = heads_of(target, sliding_window=window)
    embeddings, features = seen_of(target, heads, torch.randint(VOCAB, (1, 12)))
    given = embeddings, features, torch.arange(11)[None]
    whole, rounds = heads.unroll(*given, STEPS), heads.rounds_of(*given)
    for begin, end in ((0, 4), (4, 9), (9, 11)):
        for k, step in enumerate(rounds(begin, end, STEPS)):
            last = max(begin, min(end, 11 - k))
            torch.testing.assert_close(step[:, : last - begin], whole[k][:, begin:last], **CLOSE)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}])
def test_packed_and_padded_texts_are_what_they_are_alone(target, options):
    heads = heads_of(target, **options)
    texts = [torch.randint(VOCAB, (1, length)) for length in (5, 7)]
    alone = [seen_of(target, heads, ids) for ids in texts]
    # Behind each text a place that its last token stands at: anything.
    packed = [torch.cat([torch.cat([each, each[:, :1]], 1) for each in part], 1) for part in zip(*alone, strict=True)]
    positions = torch.cat([torch.arange(5), torch.arange(7), torch.zeros(2, dtype=torch.long)])[None]
    padded = [torch.nn.functional.pad(each, (0, 0, 0, 2)) for each in packed]
    steps = heads.unroll(*padded, positions, STEPS, (positions == 0).cumsum(1))
    for (embeddings, features), begin in zip(alone, (0, 5), strict=True):
        length = embeddings.shape[1]
        expected = heads.unroll(embeddings, features, torch.arange(length)[None], STEPS)
        for k in range(STEPS):
            torch.testing.assert_close(steps[k][:, begin : begin + length - k], expected[k], **CLOSE)
    assert all(step.isfinite().all() for step in steps)


@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_rounds_and_no_more(target, autocast):
    heads = heads_of(target)
    embeddings, features = seen_of(target, heads, torch.randint(VOCAB, (1, 40)))
    expected = heads.unroll(embeddings, features, torch.arange(39)[None], STEPS)
    half = heads.float() if autocast else heads.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = half.unroll(embeddings.to(half.dtype), features.to(half.dtype), torch.arange(39)[None], STEPS)
    errors = [float((f.double() - e).norm() / e.norm()) for f, e in zip(found, expected, strict=True)]
    assert errors[-1] < 3 * errors[0] < 0.1  # states pass on what the steps before them rounded


def test_a_text_shorter_than_the_steps(target):
    heads = heads_of(target)
    embeddings, features = seen_of(target, heads, torch.randint(VOCAB, (1, 3)))
    steps = heads.unroll(embeddings, features, torch.arange(2)[None], STEPS)
    assert [step.shape[1] for step in steps] == [2, 1, 0, 0]
