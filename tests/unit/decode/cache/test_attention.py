"""Attention in groups against the library's, which repeats the cache."""

from types import SimpleNamespace

import pytest
import torch
from families import tiny_model
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftsmith.decode.cache import CachedModel, attention, check_rollback
from draftsmith.decode.cache.attention import attends_in_groups, grouped_attention


def inputs(groups: int, queries: int, dtype: torch.dtype, slots: int = 37):
    torch.manual_seed(0)
    query = torch.randn(2, queries, 2 * groups, 16).to(dtype).transpose(1, 2)
    # A part of a longer buffer, as a cache hands it out.
    keys, values = (torch.randn(2, 2, 64, 16).to(dtype).narrow(2, 5, slots) for _ in range(2))
    hidden = torch.rand(2, 1, queries, slots) < 0.3
    hidden[..., 0] = False
    return query, keys, values, torch.zeros(hidden.shape).to(dtype).masked_fill(hidden, torch.finfo(dtype).min)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("queries", [1, 5, 33])
@pytest.mark.parametrize("masked", [True, False])
def test_the_numbers_are_the_librarys(groups, queries, masked, dtype):
    *states, mask = inputs(groups, queries, dtype)
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    mask = mask if masked else None
    ours, weights = grouped_attention(module, *states, mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(module, *states, mask, scaling=0.3)
    assert ours.shape == (2, queries, 2 * groups, 16) and ours.is_contiguous() and weights is None
    torch.testing.assert_close(ours, theirs, atol=1e-6 if dtype == torch.float32 else 1e-2, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "falcon", "gpt2", "gemma2"])
def test_it_runs_where_heads_share_keys_and_leaves_the_config_as_it_was(name, monkeypatch):
    model, calls = tiny_model(name), []
    shares = {"llama", "gemma3", "mistral"}
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def seen(query, key, value, **options):
        calls.append((query.shape[1], key.shape[1]))
        return sdpa(query, key, value, **options)

    monkeypatch.setattr(attention.torch.nn.functional, "scaled_dot_product_attention", seen)
    before = model.config._attn_implementation
    cached = CachedModel(model, rows=1, max_length=20, block=3)
    cached.prefill(torch.ones(1, 4, dtype=torch.long))
    calls.clear()
    for width in (1, 3):
        cached.feed(torch.ones(1, width, dtype=torch.long), [4])
    assert attends_in_groups(model) == (name in shares)
    if name in shares:
        assert set(calls) == {(2, 2)} and len(calls) == 2 * model.config.num_hidden_layers
    assert model.config._attn_implementation == before
    monkeypatch.setattr(model, "forward", lambda **inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cached.feed(torch.ones(1, 3, dtype=torch.long), [4])
    assert model.config._attn_implementation == before


def test_a_forward_in_another_thread_does_not_make_a_model_unfit():
    model = tiny_model("llama")
    with attention.Grouped(model):
        check_rollback(model, "draft model")
        assert attends_in_groups(model)
