"""Linear layers that are one product, and whose weights lie as programs read them."""

import pytest
import torch
from conftest import tiny_llama
from torch import nn

from draftsmith.decode.cache.weights import groups, lay_out_weights, lend_weights, tensors

IDS = torch.arange(1, 9)[None]


def test_what_sees_one_input_is_one_product():
    model = tiny_llama(0)
    names = [group.names for group in groups(model)]
    assert names.count(("q_proj", "k_proj", "v_proj")) == names.count(("gate_proj", "up_proj")) == 2
    assert sum(map(len, names)) == sum(isinstance(module, nn.Linear) for module in model.modules())
    assert lay_out_weights(model)["model.layers.0.mlp.gate_proj.weight"].shape == (128 // 16, 32, 16)
    assert lay_out_weights(model.double())["model.layers.0.mlp.down_proj.weight"].stride() == (1, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_a_model_gives_the_same_and_is_as_it_was(bias, dtype):
    model = tiny_llama(0, attention_bias=bias).to(dtype)
    for name, tensor in tensors(model).items():
        if name.endswith("bias"):
            nn.init.normal_(tensor)
    expected, before = model(IDS).logits, list(model.named_modules())
    with lend_weights(model, lay_out_weights(model)):
        torch.testing.assert_close(model(IDS).logits, expected)
        assert model.model.layers[0].self_attn.k_proj.out_features == 16
    assert list(model.named_modules()) == before


def test_layers_that_differ_are_products_of_their_own():
    model = tiny_llama(0, layers=1)
    attention = model.model.layers[0].self_attn
    attention.k_proj = nn.Linear(32, 16)
    attention.v_proj.register_forward_hook(lambda *_: None)
    names = {group.names for group in groups(model)}
    assert {("q_proj",), ("k_proj",)} <= names and not any("v_proj" in group for group in names)
    expected = model(IDS).logits
    with lend_weights(model, lay_out_weights(model)):
        torch.testing.assert_close(model(IDS).logits, expected)
