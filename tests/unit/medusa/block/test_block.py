"""Block drafters: equal to a naive reimplementation, replayed as decoded, and refused where they cannot be."""

import pytest
import torch
from conftest import tiny_llama
from specimens import TREE, shaken

from draftsmith.decode import InputError, autoregressive_generate, replay_acceptance, speculative_generate
from draftsmith.decode.cache.features import collect_features
from draftsmith.medusa import BlockDrafter, BlockProposer
from draftsmith.medusa.block.blocks import Anchors, block_states
from draftsmith.medusa.block.heads.base import SideHead, limited
from draftsmith.medusa.block.model import default_target_layers

PROMPTS = torch.tensor([[3, 4, 5, 3, 4], [6, 1, 6, 1, 6]])
KINDS = ["sliding_attention", "full_attention"]
FEW = torch.tensor([1, 3, 4, 5, 6, 8])
SHAPES = {
    "DFlash": {"anchor_guesses": False, "layers": 2},
    "DSpark": {"markov_rank": 4},
    "DFlash, a window": {"anchor_guesses": False, "layers": 2, "layer_types": KINDS, "sliding_window": 4},
    "DFlash, causal": {
        **{"anchor_guesses": False, "layers": 2, "layer_types": KINDS, "sliding_window": 6, "is_causal": True}
    },
    "DSpark, a window": {"markov_rank": 4, "sliding_window": 5, "is_causal": False},
    "DFlash 2": {
        **{"selector_rank": 4, "selector_top_k": 5, "conv_kernel_size": 2, "conv_group_size": 4},
        **{"anchor_guesses": False, "layers": 2},
    },
    "DFlash 2, anchor guesses, few tokens": {
        **{"selector_rank": 3, "selector_top_k": 2, "conv_kernel_size": 3, "conv_group_size": 8, "token_map": FEW}
    },
    "DSpark with convolutions": {"markov_rank": 3, "conv_kernel_size": 2},
    "Domino": {"emb_dim": 4, "gru_hidden_dim": 5, "pure_draft_prefix_len": 1},
    "Domino, fill-in, few tokens": {"emb_dim": 3, "gru_hidden_dim": 6, "anchor_guesses": False, "token_map": FEW},
    "DSpark, few tokens": {"markov_rank": 3, "token_map": FEW},
}


@pytest.fixture(scope="module")
def target():
    return tiny_llama(5, 13, layers=3)


def block(target, block_size=4, **shape):
    torch.manual_seed(1)
    return shaken(BlockDrafter.of_target(target, 0, block_size=block_size, **shape), target)


def rms(x, weight, eps):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def turned(x, position, theta):
    """Rotate one head's vector to a position, pair by pair."""
    half = len(x) // 2
    angles = position * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x[:half], x[half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()])


def convolved(of, config, name, kernels_of, states, part):
    """DFlash 2's convolution before (`part` 0) or after (1) a sublayer, a channel at a time."""
    taps, groups = config.conv_kernel_size, config.hidden_size // config.conv_group_size
    if not taps:
        return states
    out = []
    for slot, inputs in enumerate(kernels_of):
        maps, total = of[f"{name}.kernel_projection.weight"] @ inputs, torch.zeros_like(inputs)
        for tap in range(min(taps, slot + 1)):
            for channel in range(config.hidden_size):
                kernel = of[f"{name}.base_kernel"][part, tap, channel]
                kernel = kernel + maps[(part * taps + tap) * groups + channel // config.conv_group_size]
                total[channel] += kernel * states[slot - tap][channel]
        out.append(total)
    return out


def naive(drafter, embed, features, token, anchor, start):
    """One block's slots, (S, H), by loops: its text begins at place `start` of the row that `features` are of."""
    config, weights = drafter.config, dict(drafter.named_parameters())
    eps, theta = config.rms_norm_eps, config.rope_parameters["rope_theta"]
    fused = [rms(weights["fc.weight"] @ f, weights["hidden_norm.weight"], eps) for f in features[start:anchor]]
    states = [embed(torch.tensor(t)).detach() for t in [token, *[config.mask_token_id] * (config.block_size - 1)]]
    queries_a_key = config.num_attention_heads // config.num_key_value_heads
    for layer in range(config.num_hidden_layers):
        of = {name.split(".", 2)[2]: w for name, w in weights.items() if name.startswith(f"layers.{layer}.")}
        plain = [rms(x, of["input_layernorm.weight"], eps) for x in states]
        normed = convolved(of, config, "attention_conv", plain, plain, 0)
        positions = [*enumerate(fused), *((anchor - start + slot, x) for slot, x in enumerate(normed))]
        attended = []
        for slot, x in enumerate(normed):
            heads, at_slot = [], anchor - start + slot
            windowed = config.layer_types[layer] == "sliding_attention"
            causal = windowed if config.is_causal is None else config.is_causal
            last = at_slot if causal else anchor - start + config.block_size
            seen = [(at, y) for at, y in positions if at <= last]
            if windowed:
                seen = [(at, y) for at, y in seen if at_slot - at < config.sliding_window]
            for head in range(config.num_attention_heads):
                own = slice(head * config.head_dim, (head + 1) * config.head_dim)
                key = slice(head // queries_a_key * config.head_dim, (head // queries_a_key + 1) * config.head_dim)
                q = rms(of["self_attn.q_proj.weight"][own] @ x, of["self_attn.q_norm.weight"], eps)
                q = turned(q, at_slot, theta)
                keys = [
                    turned(rms(of["self_attn.k_proj.weight"][key] @ y, of["self_attn.k_norm.weight"], eps), at, theta)
                    for at, y in seen
                ]
                shares = torch.stack([q @ k for k in keys]).div(config.head_dim**0.5).softmax(0)
                values = torch.stack([of["self_attn.v_proj.weight"][key] @ y for _, y in seen])
                heads.append(shares @ values)
            attended.append(of["self_attn.o_proj.weight"] @ torch.cat(heads))
        attended = convolved(of, config, "attention_conv", plain, attended, 1)
        states = [x + y for x, y in zip(states, attended, strict=True)]
        plain = [rms(x, of["post_attention_layernorm.weight"], eps) for x in states]
        inner = [
            of["mlp.down_proj.weight"] @ (
                torch.nn.functional.silu(of["mlp.gate_proj.weight"] @ y) * (of["mlp.up_proj.weight"] @ y)
            )
            for y in convolved(of, config, "mlp_conv", plain, plain, 0)
        ]  # fmt: skip
        inner = convolved(of, config, "mlp_conv", plain, inner, 1)
        states = [x + y for x, y in zip(states, inner, strict=True)]
    return torch.stack([rms(x, weights["norm.weight"], eps) for x in states])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_blocks_are_those_of_a_naive_reimplementation(target, shape, monkeypatch):
    """Two texts packed in a row; in double precision, in which the library's norm does not compute."""
    target = tiny_llama(5, 13, layers=3).double()
    drafter = block(target, **shape)
    monkeypatch.setattr(
        "transformers.models.llama.modeling_llama.LlamaRMSNorm.forward",
        lambda norm, x: rms(x, norm.weight, norm.variance_epsilon),
    )
    ids, lengths = torch.randint(13, (1, 17), generator=torch.Generator().manual_seed(2)), (7, 10)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    texts = (positions == 0).cumsum(1)
    with torch.no_grad(), collect_features(target, drafter.layer_ids) as features:
        target.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False)
    (features,) = features
    indices = torch.tensor([[1, 5, 9, 16]])
    embed = target.get_input_embeddings()
    with torch.no_grad():
        context = drafter.context(drafter.fuse(features), positions)
        anchors = Anchors.at(indices, ids, positions, texts)
        hidden = block_states(drafter, embed, context, anchors, texts)
        for n, anchor in enumerate(indices[0].tolist()):
            start = 0 if anchor < lengths[0] else lengths[0]
            expected = naive(drafter, embed, features[0], int(ids[0, anchor]), anchor, start)
            torch.testing.assert_close(hidden[0, n], expected, rtol=0, atol=1e-6)  # angles are float32


def chosen(head, slots, before, plain):
    """DFlash 2's scores of the most likely tokens of a block's guesses, (K, D), by loops."""
    of, scores = dict(head.named_parameters()), torch.full_like(plain, -torch.inf)
    silent = len(slots) - len(plain)
    for guess, logits in enumerate(plain):
        state = of["hidden_projection.weight"] @ slots[silent + guess]
        side = of["predecessor_codebook.weight"][before[silent + guess]] * state
        for token in sorted(range(len(logits)), key=lambda token: -logits[token])[: head.candidates]:
            scores[guess, token] = logits[token] + side @ of["successor_codebook.weight"][token]
    return scores


def recurrent(drafter, seen):
    """What Domino's GRU remembers before each guess, (…, K, G), by the library's GRU."""
    gru = torch.nn.GRU(seen.shape[-1], drafter.config.gru_hidden_dim, bias=False, batch_first=True)
    gru.load_state_dict(drafter.domino_head.prefix_gru.state_dict())
    return gru(seen)[0]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_head_that_adds_logits_is_one_map_with_the_targets(target, shape):
    drafter = block(target, **shape)
    head, slots, embed = (
        drafter.head_for(target),
        torch.randn(2, 4, target.config.hidden_size),
        target.get_input_embeddings(),
    )
    before = torch.tensor([[1, 2, 3, 4], [4, 5, 6, 7]])
    found, hidden = drafter.whole_head(head)(drafter.head_states(slots, before, embed)), drafter.guessing(slots)
    logits = drafter.logits(hidden, drafter.sides(slots, before, embed), head)
    if (count := getattr(drafter.side_head, "candidates", None)) is not None:
        found = limited(found, head(hidden).topk(count).indices)
    torch.testing.assert_close(found, logits)
    weight = target.get_output_embeddings().weight
    if (ids := drafter.token_map) is not None:
        weight = weight[ids]
    naive = hidden @ weight.T
    if drafter.markov_head is not None:
        naive = naive + drafter.markov_head.markov_w1.weight[before] @ drafter.markov_head.markov_w2.weight.T
    if (head := drafter.candidate_selector) is not None:
        naive = torch.stack([chosen(head, *row) for row in zip(slots, before, naive, strict=True)])
    if (head := drafter.domino_head) is not None:
        large = 50 * embed(before)  # such that its gates are far from a half
        remembered = head.prefix_gru(large, large.new_zeros(2, drafter.config.gru_hidden_dim))
        torch.testing.assert_close(remembered, recurrent(drafter, large))
        inner = torch.cat([hidden, recurrent(drafter, embed(before[:, drafter.config.silent :]))], -1)
        added = torch.nn.functional.silu(inner @ head.embed_proj[0].weight.T) @ head.embed_proj[2].weight.T
        added[:, : drafter.config.pure_draft_prefix_len] = 0
        naive = naive + added
    torch.testing.assert_close(logits, naive)
    if (head := drafter.side_head) is not None:  # as it steps in decoding
        seen = drafter.read(before, embed)
        torch.testing.assert_close(head.forced(slots, seen), SideHead.forced(head, slots, seen))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_block_past_the_length_limit_is_as_before_it(target, shape):
    """The last drafts, of one or two tokens, come from whole blocks, whose positions may not be cut."""
    found = []
    for tokens in (3, 30):
        wide = shape | ({"sliding_window": 9} if "sliding_window" in shape else {})
        proposer, states = BlockProposer(block(target, 8, **wide)), []
        proposer._block.register_forward_hook(
            lambda _module, _inputs, output, states=states: states.append(output.logits)
        )
        speculative_generate(target, proposer, PROMPTS[:1], draft_length=1, max_new_tokens=tokens, do_sample=False)
        found.append(next(output for output in states if output.shape[1] > 5))
    torch.testing.assert_close(*found, atol=0, rtol=0)


REFUSED = [
    ("mask_token_id", {"mask_token": 13}),
    ("target_layer_ids", {"layer_ids": [0, 3]}),
    ("block_size", {"block_size": 0}),
    ("block_size", {"block_size": 1, "anchor_guesses": False}),
    ("token_map", {"token_map": torch.tensor([1, 1])}),
    ("markov_rank", {"markov_rank": -1}),
    ("heads", {"markov_rank": 2, "emb_dim": 2}),
    ("selector_top_k", {"selector_rank": 2, "selector_top_k": 14}),
    ("selector_top_k", {"selector_rank": 2}),
    ("conv_kernel_size", {"conv_kernel_size": 9}),
    ("conv_group_size", {"conv_kernel_size": 2, "conv_group_size": 5}),
    ("gru_hidden_dim", {"emb_dim": 2, "gru_hidden_dim": 0}),
    ("pure_draft_prefix_len", {"emb_dim": 2, "pure_draft_prefix_len": 8}),
    ("sliding_window", {"sliding_window": 7}),
]


@pytest.mark.parametrize(("field", "shape"), REFUSED)
def test_drafters_that_cannot_be_are_refused_by_their_field(target, field, shape):
    with pytest.raises(InputError, match=f"{field}: expected"):
        BlockDrafter.of_target(target, **{"mask_token": 0, **shape})


def test_what_does_not_fit_is_refused(target):
    drafter = block(target, block_size=1, markov_rank=2)
    few = block(target, **SHAPES["DFlash 2"] | {"selector_top_k": 1})
    for heads, message in (
        (drafter, "tree: expected at most the block's depth"),
        (few, "tree: expected at most 1 sib"),
    ):
        with pytest.raises(InputError, match=message):
            BlockProposer(heads, TREE)
    with pytest.raises(InputError, match="block: expected heads with the target's vocab_size"):
        speculative_generate(tiny_llama(5, 14, layers=3), BlockProposer(drafter), PROMPTS, draft_length=1)


def test_another_targets_head_is_looked_up_anew(target):
    proposer = BlockProposer(block(target, markov_rank=2))
    other = tiny_llama(6, 13, layers=3)
    for model in (target, other, target):
        plain = autoregressive_generate(model, PROMPTS, max_new_tokens=8, do_sample=False).sequences
        out = speculative_generate(model, proposer, PROMPTS, draft_length=3, max_new_tokens=8, do_sample=False)
        assert out.sequences.tolist() == plain.tolist()
        assert torch.equal(proposer.draft_model.rows, model.get_output_embeddings().weight)


def test_layers_are_those_of_the_papers():
    assert default_target_layers(36, 5) == [1, 9, 17, 25, 33]  # Qwen3-8B
    assert default_target_layers(30, 2) == [1, 27]
    assert default_target_layers(30, 1) == [15]
    assert default_target_layers(3, 2) == [1]


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "shape",
    [{"markov_rank": 3}, {"anchor_guesses": False}, SHAPES["DFlash 2"], SHAPES["Domino"]],
    ids=["DSpark", "DFlash", "DFlash 2", "Domino"],
)
def test_a_drafter_in_bfloat16_drafts_for_a_target_in_float32(target, shape, tree):
    """As `measure` chooses on CPUs; replay counts what the decoder counts."""
    proposer = BlockProposer(block(target, **shape).bfloat16(), tree)
    plain = autoregressive_generate(target, PROMPTS, max_new_tokens=12, do_sample=False).sequences
    out = speculative_generate(target, proposer, PROMPTS, draft_length=3, max_new_tokens=12, do_sample=False)
    assert out.sequences.tolist() == plain.tolist()
    replay = replay_acceptance(target, proposer, list(plain), [5, 5], [3], 0, max_new_tokens=12)
    assert [text.counts[3].num_drafts for text in replay.texts] == [row.num_drafts for row in out.row_counts]
