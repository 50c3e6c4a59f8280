"""EAGLE-3 heads: what they see and give, and how they are saved."""

import json

import pytest
import torch
from conftest import tiny_llama
from safetensors.torch import load_file, save_file
from specimens import eagle

from draftsmith.decode import Tree, replay_acceptance, speculative_generate
from draftsmith.decode.cache.features import collect_features, default_layers
from draftsmith.decode.errors import InputError
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.proposer import EagleProposer

VOCAB = 31


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0, VOCAB, layers=4)


@pytest.mark.parametrize(
    ("layers", "depths"), [(32, [2, 16, 29]), (30, [2, 15, 27]), (12, [2, 6, 9]), (4, [1, 2, 3]), (1, [1])]
)
def test_features_are_taken_where_servers_take_them(layers, depths):
    assert default_layers(layers) == depths


def test_features_are_the_hidden_states_of_the_library(target):
    ids = torch.arange(1, 8)[None]
    with torch.no_grad():
        whole = target(ids, output_hidden_states=True).hidden_states
    hooks = [len(layer._forward_hooks) for layer in target.model.layers]
    with torch.no_grad(), collect_features(target, [1, 2, 3]) as features:
        target(ids)
        target(ids[:, :3])
    torch.testing.assert_close(features[0], torch.cat([whole[depth] for depth in (1, 2, 3)], -1))
    torch.testing.assert_close(features[1], features[0][:, :3])
    assert [len(layer._forward_hooks) for layer in target.model.layers] == hooks


@pytest.mark.parametrize("depths", [[], [0, 1], [2, 1], [1, 1], [1, 5]])
def test_depths_that_the_target_does_not_have_are_refused(target, depths):
    with pytest.raises(InputError, match=r"^depths: expected ascending depths between 1 and the target's 4 layers"):
        collect_features(target, depths).__enter__()


def test_under_autocast_nothing_is_kept_beside_what_the_maps_compute_in(target):
    heads = EagleHeads.of_target(target, fc_norm=True, norm_before_residual=True, norm_output=True)
    embeddings, features = torch.randn(2, 6, 32).bfloat16(), torch.randn(2, 6, 96).bfloat16()
    kept: list[torch.Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    )
    with torch.autocast("cpu", torch.bfloat16), hooks:
        step = heads(embeddings, heads.fuse(features), torch.arange(6)[None])
    assert step.states.dtype == step.hidden.dtype == torch.bfloat16
    # Besides are what a norm keeps of its own, H wide, and weights.
    wide = [tensor for tensor in kept if tensor.shape[:2] == (2, 6) and tensor.shape[-1] in (64, 96)]
    assert wide and {tensor.dtype for tensor in wide} == {torch.bfloat16}


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"norm_before_residual": True}, {"fc_norm": True, "norm_output": True}])
def test_a_position_that_sees_itself_is_computed_as_in_the_paper(target, options):
    heads = EagleHeads.of_target(target, **options)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    layer, attention = heads.midlayer, heads.midlayer.self_attn
    embeddings, features = torch.randn(1, 1, 32), torch.randn(1, 1, 96)
    norms = heads.fc_norm if heads.config.fc_norm else [torch.nn.Identity()] * 3
    state = heads.fc(torch.cat([norm(part) for norm, part in zip(norms, features.chunk(3, -1), strict=True)], -1))
    normed = layer.hidden_norm(state)
    values = attention.v_proj(torch.cat([layer.input_layernorm(embeddings), normed], -1)).unflatten(-1, (-1, 8))
    values = values.repeat_interleave(32 // 8 // values.shape[2], 2)
    hidden = (normed if heads.config.norm_before_residual else state) + attention.o_proj(values.flatten(2))
    raw = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    step = heads(embeddings, heads.fuse(features), torch.zeros(1, 1, dtype=torch.long))
    torch.testing.assert_close(step.hidden, heads.norm(raw))
    torch.testing.assert_close(step.states, step.hidden if heads.config.norm_output else raw)


def test_heads_are_saved_under_the_authors_names(target, tmp_path):
    heads = EagleHeads.of_target(target, token_map=torch.tensor([7, 2, 30]))
    heads.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {"fc.weight", "midlayer.self_attn.q_proj.weight", "midlayer.hidden_norm.weight", "norm.weight",
            "lm_head.weight", "d2t", "t2d"} <= set(stored)  # fmt: skip
    assert stored["d2t"].tolist() == [2, 6, 28] and stored["t2d"].nonzero()[:, 0].tolist() == [2, 7, 30]
    again = EagleHeads.from_pretrained(tmp_path)
    assert again.config.architectures == ["LlamaForCausalLMEagle3"] and again.layer_ids == [1, 2, 3]
    torch.testing.assert_close(again.state_dict(), heads.state_dict())
    torch.testing.assert_close(again.lm_head.weight, target.get_output_embeddings().weight[[2, 7, 30]])
    assert again.widened(torch.ones(3)).isfinite().nonzero()[:, 0].tolist() == [2, 7, 30]


FC = "fc.weight of EAGLE-3 heads in floating"
DAMAGES = [
    (lambda t: t.pop("fc.weight"), "found 1 missing: fc.weight"),
    (lambda t: t.update(extra=torch.zeros(1)), "found 1 not expected: extra"),
    (lambda t: t.update(d2t=torch.tensor([2, 1, 28])), "d2t: expected different ids below 31"),
    (lambda t: t["t2d"].zero_(), "d2t: expected the tokens that t2d names"),
    (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}), FC),
    (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}), FC),
    (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.complex64)}), FC),
    (lambda t: t.update(d2t=t["d2t"].float()), "d2t of EAGLE-3 heads in int64, found F32"),
    (lambda t: t.update(t2d=t["t2d"].long()), "t2d of EAGLE-3 heads in bool, found I64"),
]
CONFIGS = [
    {"hidden_size": 0},
    {"num_attention_heads": 10**7},
    {"num_key_value_heads": 3},
    {"head_dim": -1},
    {"intermediate_size": 10**12},
    {"rms_norm_eps": float("nan")},
    {"max_position_embeddings": 0},
    {"vocab_size": "many"},
    {"eagle_aux_hidden_state_layer_ids": [1.5]},
    {"eagle_aux_hidden_state_layer_ids": [True]},
    {"rope_parameters": {"rope_type": "none such", "rope_theta": 1e4}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": "wide"}},
    {"hidden_act": "none such"},
]


@pytest.mark.parametrize(("change", "said"), [*DAMAGES, *((fields, "expected") for fields in CONFIGS)])
def test_files_that_are_no_heads_are_refused_in_one_line(target, tmp_path, change, said):
    EagleHeads.of_target(target, token_map=torch.tensor([2, 7, 30])).save_pretrained(tmp_path)
    doors = [EagleHeads.from_pretrained]
    if callable(change):
        tensors = load_file(tmp_path / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    else:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        doors.append(EagleHeads.without_weights)
    for read in doors:
        with pytest.raises(InputError) as error:
            read(tmp_path)
        assert said in str(error.value) and "\n" not in str(error.value)


def test_another_target_is_refused(target):
    heads = EagleHeads.of_target(target)
    heads.check_fits(target)
    with pytest.raises(InputError, match=r"^eagle: expected heads with the target's vocab_size 40, found 31$"):
        heads.check_fits(tiny_llama(0, 40, layers=4))
    with pytest.raises(InputError, match="between 1 and the target's 2 layers"):
        heads.check_fits(tiny_llama(0, VOCAB, layers=2))


def test_a_proposer_refuses_what_does_not_fit(target):
    few, heads, ids = eagle(target, torch.tensor([1, 2])), eagle(target), torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
    tree = Tree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)])
    with pytest.raises(InputError, match=r"^tree: expected at most 2 siblings"):
        speculative_generate(target, EagleProposer(few, tree), ids, draft_length=2, max_new_tokens=4)
    with pytest.raises(InputError, match=r"^eagle: expected heads with the target's vocab_size"):
        speculative_generate(tiny_llama(0, 40, layers=4), EagleProposer(heads), ids, max_new_tokens=4)
    with pytest.raises(InputError, match="chains under sampling"):
        replay_acceptance(target, EagleProposer(heads, tree), [ids[0]], [2], [2], temperature=1)
