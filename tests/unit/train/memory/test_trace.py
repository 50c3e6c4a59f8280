"""Traces against what PyTorch allocates and keeps."""

import pytest
import torch
from conftest import tiny_llama
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from draftsmith.decode.cache.kernels import CudaKernels
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.memory.trace import BatchShape, LiveBytes, precision_of, shadow

ROWS, LENGTH = 4, 64


def kept(model: PreTrainedModel, precision: str = "float32") -> tuple[int, int]:
    """The bytes that a forward leaves, and their peak."""
    inputs = BatchShape(LENGTH, ROWS).inputs()
    with LiveBytes() as live, precision_of(precision):
        hidden = last_hidden(model, **inputs)
    assert hidden is not None
    return live.now, live.peak


@pytest.mark.parametrize(("precision", "kernel"), [("float32", "math"), ("autocast", "flash")])
def test_what_is_kept_is_what_autograd_saves(precision, kernel):
    """Each storage once, the weights and the batch left out.

    In groups of query heads, without a mask, CUDA has a kernel for half precision alone: float32 falls to math.
    """
    model = tiny_llama(layers=3, hidden=64).train().requires_grad_(True)
    known, saved = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor keeps its address from being used again
        return tensor

    inputs = BatchShape(LENGTH, ROWS).inputs()
    known |= {t.untyped_storage().data_ptr() for t in inputs.values()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), precision_of(precision), CudaKernels() as kernels:
        hidden = last_hidden(model, **inputs)
    assert hidden.requires_grad and set(kernels.chosen) == {kernel}
    size = sum(size for size, _ in saved.values())
    now, peak = kept(model, precision)
    assert size <= now <= 1.03 * size and peak > now


def test_a_layer_in_half_precision_is_that_of_the_formula():
    """Korthikanti et al. 2022, section 4.1: 34·s·b·h less two dropout masks of s·b·h, without 5·a·s²·b."""
    h, sizes, mode = 256, [], FakeTensorMode()
    for layers in (1, 2):
        config = GPT2Config(
            vocab_size=512, n_embd=h, n_layer=layers, n_head=4, n_positions=LENGTH, activation_function="gelu",
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        )  # fmt: skip
        with torch.device("meta"):
            model = GPT2LMHeadModel(config)
        shadow(mode, model, half=True)
        with mode:
            sizes.append(kept(model.train(), "half")[0])
    found = (sizes[1] - sizes[0]) / (ROWS * LENGTH * h)
    # Moments of the norms, and the log of the sums that attention keeps.
    assert 32 <= found <= 32.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_of_experts_takes_what_it_allocates_in_either_dtype(dtype):
    """The product of experts has shapes without data in bfloat16 alone."""
    config = MixtralConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, num_local_experts=4, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        shape = MixtralForCausalLM._from_config(config, dtype=dtype)
    mode = FakeTensorMode()
    shadow(mode, shape)
    with mode:
        planned = kept(shape)
    assert planned == kept(MixtralForCausalLM._from_config(config, dtype=dtype))
