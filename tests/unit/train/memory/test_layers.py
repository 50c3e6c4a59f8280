"""Traces of deep models from shallow ones, against those of whole ones."""

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.train.memory import activations
from draftsmith.train.memory.activations import BatchShape, shadow, text_loss, trace_cache, trace_forward, trace_step
from draftsmith.train.memory.layers import Course, like_layers, traced_whole

CONFIGS = Path(__file__).parents[3] / "golden" / "configs"


def model_of(name: str, mode: FakeTensorMode, half: bool = False):
    """A model of a family with six small layers, without data."""
    config = AutoConfig.from_pretrained(CONFIGS / f"{name}.json")
    for field, value in {
        "num_hidden_layers": 6,
        "vocab_size": 500,
        "attention_dropout": 0.0,
        "attn_pdrop": 0.0,
    }.items():
        if hasattr(config, field):
            setattr(config, config.attribute_map.get(field, field), value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:6]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shadow(mode, model, half)
    return model


@pytest.mark.parametrize(
    ("name", "precision", "checkpointing", "packed"),
    [("qwen3-0.6b", "autocast", True, True), ("pythia-160m", "half", False, False),
     ("distilgpt2", "autocast", False, False)],
)  # fmt: skip
def test_a_few_layers_tell_of_all(name, precision, checkpointing, packed, monkeypatch):
    """To the last byte. What is frozen below keeps less of the first layer."""
    mode, batch, found = FakeTensorMode(), BatchShape(64, 2, packed), []
    model = model_of(name, mode, precision == "half")
    model.get_input_embeddings().requires_grad_(name == "distilgpt2")
    assert like_layers(model) is not None
    refused, grown = [], Course.grown
    monkeypatch.setattr(Course, "grown", lambda *args: grown(*args) or refused.append(args))
    for _ in range(2):
        step = trace_step(mode, model, batch, text_loss(model, batch, precision), checkpointing)
        found.append((step, trace_forward(mode, model, batch, precision), trace_cache(mode, model, batch, precision)))
        assert like_layers(model) is not None
        monkeypatch.setattr(activations, "traced_by_layers", traced_whole)
    assert found[0] == found[1] and not refused
    assert len(model.get_decoder().get_submodule(like_layers(model)[1])) == 6


def test_layers_that_differ_are_traced_whole():
    model = model_of("qwen3-0.6b", FakeTensorMode())
    assert like_layers(model)[1] == "layers"
    layer = model.model.layers[3]
    layer.mlp.up_proj.weight.requires_grad_(False)
    assert like_layers(model) is None
    layer.mlp.up_proj.weight.requires_grad_(True)
    layer.self_attn.scaling = 1.0
    assert like_layers(model) is None
    model.model.layers = model.model.layers[:3]
    assert like_layers(model) is None and like_layers(torch.nn.Linear(2, 2)) is None


def test_a_course_grows_by_what_is_done_again():
    two, three = Course(4, (3, -1, 5)), Course(5, (3, -1, 3, -1, 5))
    assert two.grown(three, 3) == Course(7, (3, -1, 3, -1, 3, -1, 3, -1, 5))
    assert (two.peak, two.end, three.peak) == (11, 11, 14)
    assert two.grown(Course(5, (3, -2, 3, -1, 6)), 3) is None and three.grown(two, 1) is None
