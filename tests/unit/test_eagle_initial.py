"""How EAGLE-3 heads begin: as the target's last layer."""

import pytest
import torch
from conftest import tiny_llama
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from draftsmith.decode.cache.features import collected
from draftsmith.decode.errors import InputError
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.initial import begin_as_last_layer, scale_of


@torch.no_grad()
def test_they_compute_what_the_last_layer_does_on_what_it_sees():
    target = tiny_llama(0, 31, layers=3)
    for layer in target.model.layers:  # norms that multiply by something
        layer.input_layernorm.weight.uniform_(0.5, 1.5)
        layer.post_attention_layernorm.weight.uniform_(0.5, 1.5)
    heads = EagleHeads.of_target(target, layer_ids=[1, 2])
    begin_as_last_layer(heads, target)
    ids = torch.randint(31, (2, 6))
    with collected(target, heads.layer_ids) as features:
        expected = target.model(ids).last_hidden_state
    step = heads(torch.randn(2, 6, 32), heads.fuse(features[0]), torch.arange(6)[None])
    torch.testing.assert_close(step.hidden, expected, atol=1e-5, rtol=1e-5)


def test_a_norm_that_stores_its_scale_less_one_is_understood():
    norm = Gemma2RMSNorm(8)
    with torch.no_grad():
        norm.weight.uniform_(-0.5, 0.5)
        torch.testing.assert_close(scale_of(norm, 8), 1 + norm.weight)


@pytest.mark.parametrize("what", ["shape", "codes"])
def test_another_layer_is_refused(what):
    target = tiny_llama(0, 31, layers=3)
    heads = EagleHeads.of_target(target, intermediate_size=7 if what == "shape" else target.config.intermediate_size)
    if what == "codes":  # of a quantised target
        attention = target.model.layers[-1].self_attn
        attention.o_proj.weight = torch.nn.Parameter(torch.zeros(32, 32, dtype=torch.int8), requires_grad=False)
    name = "mlp.gate_proj" if what == "shape" else "self_attn.o_proj"
    with pytest.raises(
        InputError, match=f"^init: expected random for a target .*found last_layer, and another {name}$"
    ):
        begin_as_last_layer(heads, target)
