"""How EAGLE-3 heads begin: as the target's last layer where they can compute what it does, else at random."""

import math

import pytest
import torch
from conftest import tiny_llama
from families import tiny_model
from gemma import tiny_gemma
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import collect_features
from draftsmith.decode.errors import InputError
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.initial import begin_as_last_layer, choose_init, new_heads

VOCAB = 31


def stirred(target: PreTrainedModel) -> PreTrainedModel:
    """The target with norms that multiply by something, and biases that add something."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand_like(parameter) - 0.5)
    return target


def run_of(**fields: object) -> EagleTrainingConfig:
    return EagleTrainingConfig("t", ["c"], **fields)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral", "head width"])
def test_they_compute_what_the_last_layer_does_on_what_it_sees(name):
    wide = tiny_llama(0, VOCAB, layers=3, head_dim=24, rope_parameters={"rope_type": "default", "rope_theta": 50.0})
    target = stirred(wide if name == "head width" else tiny_model(name))
    depth = target.config.num_hidden_layers - 1
    plain = run_of(layer_ids=[depth], norm_before_residual=False)
    heads = new_heads(plain, target)
    for config in (plain, run_of(init="last_layer")):
        assert choose_init(config, heads, target) == ("last_layer", "begun as the target's last layer")
    ids = torch.randint(VOCAB, (2, 5))
    with collect_features(target, heads.layer_ids) as features:
        expected = target.model(ids).last_hidden_state
    embeddings = torch.randn(2, 5, heads.config.hidden_size)
    step = heads(embeddings, heads.fuse(features[0]), torch.arange(5)[None])
    torch.testing.assert_close(step.hidden, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen2", "self_attn.k_proj.bias"),
        ("qwen3", "self_attn.k_norm.weight"),
        ("gemma2", "post_feedforward_layernorm.weight"),
        ("phi3", "mlp.gate_up_proj.weight"),
        ("gpt-oss", "mlp.experts.down_proj"),
    ],
)
def test_other_families_begin_at_random_and_uniform_at_most(name, said):
    target, said = stirred(tiny_model(name)), f"the target's last layer has {said}, which Llama's does not have"
    if not target.config.tie_word_embeddings:
        target.get_output_embeddings().weight.data.mul_(2)  # rows that would be far apart
    config = run_of(layer_ids=[1, 2])
    heads = new_heads(config, target)
    assert choose_init(config, heads, target) == ("random", f"begun at random, because {said}")
    assert loss_of(heads, target) <= math.log(target.config.vocab_size)
    expected = f"^init: expected auto or random for a target like this, found last_layer, and {said}$"
    with pytest.raises(InputError, match=expected):
        new_heads(run_of(init="last_layer"), target)


@torch.no_grad()
def loss_of(heads: EagleHeads, target: PreTrainedModel) -> float:
    """The first step's divergence from the target's distribution, a token."""
    ids = torch.randint(target.config.vocab_size, (8, 9))
    with collect_features(target, heads.layer_ids) as features:
        log_p = target(ids).logits[:, 1:].log_softmax(-1)
    embeddings = target.get_input_embeddings()(ids[:, 1:])
    step = heads(embeddings, heads.fuse(features[0][:, :-1]), torch.arange(8)[None])
    log_q = heads.lm_head(step.hidden).log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def test_layers_that_turn_by_angles_of_their_own_are_read_by_the_last_ones_kind():
    for layers, theta in ((2, 1e6), (3, 1e4)):
        heads = EagleHeads.of_target(tiny_gemma(layers=layers), layer_ids=[1])
        assert heads.config.rope_parameters == {"rope_type": "default", "rope_theta": theta}
    partial = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    heads = EagleHeads.of_target(tiny_model("phi3", rope_parameters=partial, head_dim=8))
    assert heads.config.rope_parameters == {"rope_type": "default", "rope_theta": 500.0}
    target = tiny_llama(0, VOCAB)
    target.config.rope_parameters = {"rope_type": "default"}
    with pytest.raises(InputError, match=r"^target: expected a rope_theta .* found none"):
        EagleHeads.of_target(target)


@pytest.mark.parametrize("what", ["shape", "activation"])
def test_another_layer_is_not_begun_as(what):
    target = tiny_llama(0, VOCAB, layers=3, hidden_act="gelu" if what == "activation" else "silu")
    if what == "shape":
        target.model.layers[-1].mlp.gate_proj = torch.nn.Linear(32, 7, bias=False)
    said = {
        "shape": "the target's last layer has another mlp.gate_proj",
        "activation": "the target's hidden_act is gelu, and Llama's silu",
    }[what]
    assert choose_init(run_of(), new_heads(run_of(), target), target)[1] == f"begun at random, because {said}"
    with pytest.raises(InputError, match=f"^init: .* found last_layer, and {said}$"):
        new_heads(run_of(init="last_layer"), target)


def test_variants_of_the_layer_begin_at_random_unless_told():
    target = tiny_llama(0, VOCAB, layers=3)
    for name in ("norm_output", "norm_before_residual", "fc_norm"):
        config = run_of(**{"norm_before_residual": False, name: True})
        heads = new_heads(config, target)
        assert getattr(heads.config, name)
        assert choose_init(config, heads, target)[1] == (
            f"begun at random, because {name}, which the target's last layer does not have"
        )
        told = new_heads(run_of(init="last_layer", **{name: True}), target)
        assert torch.equal(told.midlayer.mlp.up_proj.weight, target.model.layers[-1].mlp.up_proj.weight)
    assert new_heads(run_of(), target).config.norm_before_residual
    copied = run_of(init="last_layer")
    begun = new_heads(copied, target)
    assert not begun.config.norm_before_residual
    begin_as_last_layer(begun, target)
    torch.testing.assert_close(begun.state_dict(), new_heads(copied, target).state_dict())
