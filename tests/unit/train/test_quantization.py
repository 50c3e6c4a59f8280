"""Quantised targets, without the libraries that quantise: what drafters begin with, and what is said of a teacher."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import LlamaConfig

from draftsmith.decode.errors import InputError
from draftsmith.distill.config import DraftInit
from draftsmith.distill.draft_init import make_draft
from draftsmith.medusa.block.initial import begin_as_last_layers, layers_mismatch
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.initial import begin_as_last_layer, layer_mismatch
from draftsmith.train.checkpoint import check_finite
from draftsmith.train.models import load_model
from draftsmith.train.quantization import (
    float_state,
    own_shapes,
    parameter_count,
    quantization_of,
    teacher_in_words,
    weight_of,
)
from draftsmith.train.teacher.target_ends import read_ends


class Packed(nn.Module):
    """A linear map with a weight in int8 and a scale a row, as libraries have them."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.qweight = nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale.detach())
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, self.qweight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


class Dequantizing(TwoTensor):
    """A weight as torchao has it: two tensors in one, without most operations."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is not torch.ops.aten.detach.default:
            raise NotImplementedError(f"{func}")
        return cls(args[0].a, args[0].b)

    def dequantize(self):
        return self.a * self.b


@pytest.fixture
def packed(target):
    """The tiny target with each linear map of its layers in int8; the head stays."""
    target = copy.deepcopy(target)
    for layer in target.model.layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                parent, _, last = name.rpartition(".")
                setattr(layer.get_submodule(parent), last, Packed(module))
    target.config.quantization_config = {"quant_method": "gptq", "bits": 8}
    return target.requires_grad_(False)


def test_a_packed_map_is_read_by_the_identity(monkeypatch):
    monkeypatch.setattr("draftsmith.train.quantization.ROWS", 4)
    torch.manual_seed(0)
    linear = nn.Linear(10, 7)
    map = Packed(linear)
    expected = map.qweight * map.scale
    assert torch.allclose(weight_of(map, torch.float32), expected, atol=1e-6)
    assert weight_of(linear, torch.bfloat16) is linear.weight
    assert own_shapes(map) == own_shapes(linear) == {"weight": (7, 10), "bias": (7,)}


def test_tensors_of_their_own_class_are_read_and_looked_into():
    linear = nn.Linear(3, 2, bias=False)
    linear.weight = nn.Parameter(Dequantizing(torch.full((2, 3), 2.0), torch.full((2, 3), 3.0)), requires_grad=False)
    assert torch.equal(weight_of(linear, torch.float32), torch.full((2, 3), 6.0))
    check_finite(linear, "DIR", "target")
    linear.weight.b[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"found NaN or infinity in weight\.b"):
        check_finite(linear, "DIR", "target")


def test_a_draft_is_carved_out_of_packed_layers_in_floating_point(packed, tokenizer):
    draft, _ = make_draft(None, DraftInit(layers=[0]), packed, tokenizer)
    ids = torch.arange(1, 6)[None]
    kept = packed.model.layers
    packed.model.layers, packed.config.num_hidden_layers = kept[:1], 1
    assert torch.allclose(draft(ids).logits, packed(ids).logits, atol=1e-5)
    assert not hasattr(draft.config, "quantization_config")
    assert draft.num_parameters() == parameter_count(packed)


def test_random_drafts_are_not_quantised(packed, tokenizer):
    draft, _ = make_draft(None, DraftInit(config={"num_hidden_layers": 1}), packed, tokenizer)
    assert not hasattr(draft.config, "quantization_config")


def test_heads_begin_as_a_packed_last_layer(packed):
    heads = EagleHeads.of_target(packed)
    assert layer_mismatch(heads, packed) is None
    begin_as_last_layer(heads, packed)
    down = packed.model.layers[-1].mlp.down_proj
    assert torch.allclose(heads.midlayer.mlp.down_proj.weight, down.qweight * down.scale, atol=1e-6)
    drafter = BlockDrafter.of_target(packed, 0, 1)
    assert layers_mismatch(drafter, packed) is None
    begin_as_last_layers(drafter, packed)
    assert torch.allclose(drafter.layers[0].mlp.down_proj.weight, down.qweight * down.scale, atol=1e-6)


def test_the_ends_of_a_packed_target_are_in_floating_point(packed, tmp_path, monkeypatch):
    packed.config.save_pretrained(tmp_path)
    monkeypatch.setattr("draftsmith.train.teacher.target_ends.load_model", lambda *args, **kwargs: packed)
    layer = read_ends(str(tmp_path), "float32").model.layers[-1]
    assert torch.allclose(
        layer.mlp.up_proj.weight,
        float_state(packed, packed.dtype)[f"model.layers.{len(packed.model.layers) - 1}.mlp.up_proj.weight"],
    )


def test_what_compressed_tensors_packs_is_unpacked_as_it_is_loaded(target, tokenizer, tmp_path):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import ModelCompressor

    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(num_bits=8, strategy="channel")
    )
    model = copy.deepcopy(target)
    config = quantization.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            module.weight_scale.data = module.weight.abs().amax(1, keepdim=True) / 127
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    loaded = load_model(tmp_path, field="target")
    assert quantization_of(loaded.config) == "compressed-tensors, 8 bits"
    assert parameter_count(loaded) == target.num_parameters()
    draft, _ = make_draft(None, DraftInit(layers=[0, 1]), loaded, tokenizer)
    ids = torch.arange(1, 5)[None]
    assert len(loaded.model.layers) == 2 and torch.allclose(draft(ids).logits, loaded(ids).logits, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_in_fp8_is_loaded_in_the_dtype_that_was_asked_for(dtype, target, tmp_path):
    target.save_pretrained(tmp_path)
    weights, fp8 = load_file(tmp_path / "model.safetensors"), torch.float8_e4m3fn
    maps = [name for name in weights if name.endswith("_proj.weight")]
    for name in maps:
        scale = weights[name].abs().amax().view(1, 1) / 448  # one block: no side is wider than 128
        weights |= {name: (weights[name] / scale).to(fp8), f"{name}_scale_inv": scale}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path, field="target", dtype=dtype)
    assert {str(weight.dtype) for weight in model.parameters()} == {f"torch.{dtype}"}
    logits, expected = (m(torch.arange(1, 5)[None]).logits.float() for m in (model, target))
    assert 0 < (logits - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, 4 bits"),
        ({"quant_method": "awq", "bits": 4}, "awq, 4 bits"),
        ({"quant_method": "fp8"}, "fp8, 8 bits"),
        ({"quant_method": "mxfp4"}, "mxfp4, 4 bits"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, "torchao, 8 bits"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}},
            "compressed-tensors, 4 bits",
        ),
        ({"quant_method": "new"}, "new"),
    ],
)
def test_a_teacher_is_named_with_its_bits(fields, expected):
    assert quantization_of(LlamaConfig(quantization_config=fields)) == expected
    assert quantization_of(LlamaConfig()) is None
    assert teacher_in_words(expected, torch.bfloat16) == f"quantised: {expected}; computed in bfloat16"
