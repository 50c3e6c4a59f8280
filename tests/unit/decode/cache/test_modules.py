"""What the cache's forwards are made of: attention, layers, products, weights, programs and rotary positions."""

from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_llama
from families import tiny_model
from torch import nn
from transformers import GenerationConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftsmith.decode import InputError, autoregressive_generate
from draftsmith.decode.cache import CachedModel, Slots, attention, check_rollback, layers
from draftsmith.decode.cache.attention import attends_in_groups, grouped_attention
from draftsmith.decode.cache.features import collect_features
from draftsmith.decode.cache.layers import Block, Layer, Moves
from draftsmith.decode.cache.product import block_product, can_pack, pack_weight
from draftsmith.decode.cache.weights import groups, lay_out_weights, lend_weights, tensors
from draftsmith.decode.replay.texts import WrittenText, teacher_forced
from draftsmith.decode.sampling import Sampler
from draftsmith.train.data.decoding import complete
from draftsmith.train.data.examples import CompletionCollator
from draftsmith.train.losses.output_head import head_of, last_hidden
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.teacher.distribution_shards import distributions_of
from draftsmith.train.trainer import texts as read_of


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


def filled(rows: int = 2, slots: int = 12) -> Layer:
    """A layer whose keys and values are all different."""
    layer, numbers = Layer(Block(), rows, slots, whole=True), torch.arange(rows * slots * 8.0).view(rows, 2, slots, 4)
    layer.take_from([numbers.clone(), -numbers])
    return layer


def test_moves_on_the_host_are_those_on_the_device(monkeypatch):
    moves = Moves(Slots([3, 7], torch.device("cpu")), [[1, 3, 4], [2]], None, torch.arange(12))
    here, there, before = filled(), filled(), filled()
    here.move(moves)
    monkeypatch.setattr(layers, "READ_AT_ONCE", set())
    there.move(moves)
    for moved, as_well, was in zip(here.tensors, there.tensors, before.tensors, strict=True):
        assert torch.equal(moved, as_well)
        assert torch.equal(moved[0, :, 4:7], was[0, :, [4, 6, 7]]) and torch.equal(moved[1, :, 8], was[1, :, 9])


def test_a_saved_row_begins_another_layer_as_it_was():
    layer, other = filled(), Layer(Block(), 2, 12, whole=False)
    other.restore([None, layer.saved(0, 5)])
    layer.select([0])
    for states, copies in zip(layer.tensors, other.tensors, strict=True):
        assert torch.equal(states[0, :, :5], copies[1, :, :5]) and not copies[0].any()


@pytest.mark.parametrize("outputs", [5, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_weight_gives_the_same_products(outputs, dtype):
    weight, rows = torch.randn(outputs, 7).to(dtype), torch.randn(2, 3, 7).to(dtype)
    product = block_product(rows, pack_weight(weight), outputs)
    assert product.dtype == dtype
    torch.testing.assert_close(product, torch.nn.functional.linear(rows, weight))


def test_float32_takes_half_the_bytes_where_that_changes_no_number():
    weight = torch.randn(16, 8)
    assert pack_weight(weight).dtype == torch.float32
    halved = pack_weight(weight.bfloat16().float())
    assert halved.dtype == torch.bfloat16 and halved.shape == (1, 8, 16)
    assert torch.equal(halved[0].T.float(), weight.bfloat16().float())
    weight = weight.bfloat16().float()
    weight[3, 2] += 1e-6
    assert pack_weight(weight).dtype == torch.float32


def test_what_the_kernel_does_not_know_is_the_librarys():
    assert (
        can_pack(torch.zeros(1, 1))
        and not can_pack(torch.zeros(1, 1).half())
        and not can_pack(torch.zeros(1, 1).double())
    )
    assert not can_pack(torch.zeros(1, 1, device="meta"))


LIMIT, KINDS = 12, ("llama-dynamic", "llama-longrope", "phi3-longrope")
LENGTHS = (40, 4, LIMIT, LIMIT + 1, 25)


def made(name):
    """A model whose frequencies change beyond `LIMIT` tokens."""
    family, kind = name.split("-")
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 9.0]}
    limit = "max_position_embeddings" if kind == "dynamic" else "original_max_position_embeddings"
    return tiny_model(family, rope_parameters=rope, **{limit: LIMIT})


def written(model):
    generator = torch.Generator().manual_seed(1)
    size = model.config.vocab_size
    return [torch.randint(2, size, (length + 1,), generator=generator) for length in LENGTHS]


def alone(name, ids_T):
    """The library's hidden states of a text, by a model that has read nothing else."""
    return made(name).get_decoder()(input_ids=ids_T[None], use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_texts_of_a_padded_batch_are_read_as_alone(name):
    model = made(name)
    texts = written(model)
    for order in (texts, texts[::-1]):
        logits = teacher_forced(model, [WrittenText(text, 1, len(text)) for text in order])
        for text, found in zip(order, logits, strict=True):
            expected = model.lm_head(alone(name, text[:-1]))
            torch.testing.assert_close(found(0, len(expected)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_a_teacher_cache_and_training_read_them_so_too(name, tokenizer):
    model = made(name)
    texts = written(model)
    samples = [{"input_ids": text.tolist(), "labels": [IGNORED, *text[1:].tolist()]} for text in texts]
    pairs = [(sample["input_ids"], [1] * len(sample["input_ids"])) for sample in samples]
    kept = distributions_of(model, head_of(model), pairs, Sampler.of(1.0), 4)
    for pair, of_text in zip(pairs, kept, strict=True):
        (expected,) = distributions_of(made(name), head_of(model), [pair], Sampler.of(1.0), 4)
        torch.testing.assert_close(of_text.log_p_of_text, expected.log_p_of_text, atol=2e-3, rtol=2e-3)
    collate = CompletionCollator(tokenizer, by_text=True)
    hidden = last_hidden(model, **read_of(collate(samples)))
    for text, found in zip(texts, hidden, strict=True):
        torch.testing.assert_close(found[: len(text)], alone(name, text), atol=1e-4, rtol=1e-4)
    row = {"position_ids": [at for text in texts for at in range(len(text))]}
    row |= {part: [x for sample in samples for x in sample[part]] for part in ("input_ids", "labels")}
    packed = last_hidden(model, **read_of(collate([row])))[0].split([len(text) for text in texts])
    for text, found in zip(texts, packed, strict=True):
        torch.testing.assert_close(found, alone(name, text), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_completions_are_those_of_each_prompt_alone(name):
    model = made(name)
    prompts = [text.tolist() for text in written(model)]
    generation = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    seen: dict[int, list[int]] = {}

    def observe(place, tokens, ended):
        seen.setdefault(place, []).extend(tokens)

    completions = complete(model, generation, prompts, 0, rows=3, observer=observe)
    for place, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = torch.tensor([prompt])
        expected = made(name).generate(ids, attention_mask=torch.ones_like(ids), generation_config=generation)
        assert completion.ids == seen[place] == expected[0, len(prompt) :].tolist()


def test_our_decoder_refuses_rows_of_both_lengths():
    model = made("phi3-longrope")
    ids, options = torch.randint(2, 60, (2, 20)), {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert autoregressive_generate(model, ids, **options).sequences.shape == (2, 24)
    mask = torch.ones_like(ids)
    mask[1, :15] = 0
    with pytest.raises(InputError, match=f"max_length: expected at most {LIMIT} tokens"):
        autoregressive_generate(model, ids, mask, **options)


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


def test_a_target_with_several_streams_of_states_has_no_features():
    target = tiny_model("gemma3n")
    with collect_features(target, [1]), pytest.raises(InputError, match="several in Gemma3nForCausalLM"):
        target(IDS)
