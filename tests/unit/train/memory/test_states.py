"""Sums of tensor sizes: what weights, gradients and optimiser states take, and how strategies divide them."""

import pytest
import torch
from conftest import tiny_llama
from transformers import Adafactor, LlamaConfig, LlamaForCausalLM

from draftsmith.train.job.optimizer import MuonAdamW
from draftsmith.train.memory.states import Weights, held_bytes, optimizer_bytes, target_bytes

SHAPE = LlamaConfig(
    vocab_size=4096, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=688, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def nbytes(tensors) -> int:
    return sum(t.nbytes for t in {id(t): t for t in tensors}.values())


def ends_of(model):
    return [model.get_input_embeddings(), model.get_output_embeddings()]


@pytest.mark.parametrize("name", ["adamw_torch_fused", "muon", "adafactor", "sgd"])
def test_weights_gradients_and_states_are_the_tensors(name):
    model = tiny_llama(layers=3, hidden=64).train().requires_grad_(True)
    model.get_input_embeddings().requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = {
        "adamw_torch_fused": lambda: torch.optim.AdamW(trained, fused=True),
        "muon": lambda: MuonAdamW(model, 1e-3, 0.1),
        "adafactor": lambda: Adafactor(trained, lr=1e-3, scale_parameter=False, relative_step=False),
        "sgd": lambda: torch.optim.SGD(trained),
    }[name]()
    model(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    halves = optimizer._halves.values() if name == "muon" else [optimizer]
    states = [v for half in halves for state in half.state.values() for v in state.values() if torch.is_tensor(v)]
    if name == "adafactor":  # a number for each tensor, the root mean square, is not counted
        states = [state for state in states if state.ndim]
    held = held_bytes(Weights.of(model), optimizer_bytes(model, name, ends_of(model)), "ddp", 2, "float32", "draft")
    assert held["draft: weights"] == nbytes(model.parameters()) + nbytes(model.buffers())
    assert held["draft: gradients"] == held["draft: DDP's buckets"] == nbytes(p.grad for p in trained)
    assert held["draft: optimiser states"] == nbytes(states)


@pytest.mark.parametrize(
    ("strategy", "weights", "master", "gradients", "states"),
    [("zero1", 1, 8, 1, 8), ("zero2", 1, 8, 8, 8), ("zero3", 8, 8, 8, 8)],
)
def test_stages_divide_as_in_the_paper(strategy, weights, master, gradients, states):
    """Rajbhandari et al. 2020, figure 1: of 2Ψ + 2Ψ + 12Ψ bytes stage 1 divides 12Ψ, stage 2 2Ψ more, stage 3 all."""
    numbers = Weights(all=1000, trained=1000, buffers=0, largest_unit=100, tail=50, bucket=16)
    held = held_bytes(numbers, 8000, strategy, 8, "half", "draft")
    assert held["draft: weights"] == 2000 / weights
    assert held["draft: gradients"] == 2000 / gradients
    assert held["draft: float32 weights"] + held["draft: optimiser states"] == 4000 / master + 8000 / states
    assert held["draft: gathered weights"] == (2000 if strategy == "zero3" else 0)
    assert held["draft: ZeRO's buckets"] == 2 * 2 * 16


def test_a_target_takes_what_its_place_says():
    target = LlamaForCausalLM(SHAPE).bfloat16().requires_grad_(False)
    whole, ends, layer = target.num_parameters() * 2, 4096 * 256 * 2, nbytes(target.model.layers[0].parameters())
    (held,) = target_bytes(target, "whole", 8).values()
    assert held == whole == nbytes(target.parameters())
    share, gathered = target_bytes(target, "sharded", 8).values()
    assert share == (whole - ends) / 8 + ends
    assert gathered == 2 * layer + ends + 2 * 256  # embeddings and the last norm stay while layers come and go
    (head,) = target_bytes(target, "elsewhere", 8).values()
    assert head == ends
    linear = [m.weight for m in target.model.modules() if isinstance(m, torch.nn.Linear)]
    rest = whole - nbytes(linear)
    for bits, expected in (
        ("8bit", sum(w.numel() + 4 * len(w) for w in linear)),
        ("4bit", sum(w.numel() / 2 + w.numel() / 16 for w in linear)),
    ):
        small, matrix = target_bytes(target, bits, 8).values()
        assert small == expected + rest and matrix == 2 * 688 * 256


def test_fsdp_gathers_two_layers_and_the_head():
    numbers = Weights.of(LlamaForCausalLM(SHAPE))
    layer = 256 * (256 + 128 + 128 + 256) + 3 * 256 * 688 + 2 * 256
    assert (numbers.largest_unit, numbers.tail) == (4096 * 256, 4096 * 256 + 256)
    assert numbers.all == 4 * layer + 2 * 4096 * 256 + 256
    held = held_bytes(numbers, 8 * numbers.all, "fsdp2", 8, "half", "draft")
    assert held["draft: weights"] == pytest.approx(4 * numbers.all / 8 + numbers.buffers)
    assert held["draft: optimiser states"] == numbers.all
    assert held["draft: gathered weights"] == 2 * (3 * 4096 * 256 + 256)
