"""GGUF files as targets: read as the model that they hold, or refused in one line."""

import json

import pytest
import torch
from conftest import tiny_llama
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize

from draftsmith.decode.errors import InputError
from draftsmith.train.files import identity
from draftsmith.train.models import load_config, load_model, load_tokenizer

PARTS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
PARTS |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up")}
NAMES = {f"blk.{i}.{part}": f"model.layers.{i}.{name}" for i in (0, 1) for part, name in PARTS.items()}
NAMES |= {f"blk.{i}.ffn_down": f"model.layers.{i}.mlp.down_proj" for i in (0, 1)}
NAMES |= {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
SIZES = {"context_length": 512, "block_count": 2, "embedding_length": 32, "feed_forward_length": 64}
HEADS = {"attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 8}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
Q8 = GGMLQuantizationType.Q8_0


def write(path, model, tokenizer, kind="llama", blocks=False, factors=None, **strings):
    """Write a Llama as llama.cpp's converter does, its matrices in floats or in blocks of 8 bits; return the path."""
    file, words, state = GGUFWriter(path, kind), tokenizer.get_vocab(), model.state_dict()
    for name, value in (SIZES | HEADS).items():
        file.add_uint32(f"{kind}.{name}", value)
    file.add_float32(f"{kind}.attention.layer_norm_rms_epsilon", model.config.rms_norm_eps)
    file.add_float32(f"{kind}.rope.freq_base", model.config.rope_parameters["rope_theta"])
    for name, value in strings.items():
        file.add_uint16("split.count", value) if name == "parts" else file.add_string(
            f"{kind}.rope.scaling.type", value
        )
    file.add_file_type(7 if blocks else 0)
    file.add_tokenizer_model("gpt2")
    file.add_token_list(sorted(words, key=words.get))
    file.add_token_merges([" ".join(m) for m in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]])
    file.add_eos_token_id(tokenizer.eos_token_id)
    for name, source in NAMES.items():
        array = state[f"{source}.weight"]
        if name[-1] in "qk":  # pairs of the rotation lie next to each other
            array = array.view(-1, 2, 4, 32).transpose(1, 2).reshape(array.shape)
        packed = blocks and array.ndim == 2
        array = quantize(array.numpy(), Q8) if packed else array.numpy()
        file.add_tensor(f"{name}.weight", array, raw_dtype=Q8 if packed else None)
    if factors is not None:
        file.add_tensor("rope_freqs.weight", factors.numpy())
    for step in (file.write_header_to_file, file.write_kv_data_to_file, file.write_tensors_to_file, file.close):
        step()
    return str(path)


def test_floats_are_the_model_and_blocks_its_rounded_weights(tmp_path, tokenizer):
    target, ids, text = tiny_llama(0, len(tokenizer)), torch.arange(40)[None], "def f(x):\n    return 12"
    path = write(tmp_path / "t.gguf", target, tokenizer)
    read, words = load_model(path, dtype="auto"), load_tokenizer(path)
    assert torch.equal(read(ids).logits, target(ids).logits)
    assert (read.config.name_or_path, read.generation_config.eos_token_id) == (path, tokenizer.eos_token_id)
    assert words.get_vocab() == tokenizer.get_vocab() and words(text).input_ids == tokenizer(text).input_ids
    blocks = write(tmp_path / "b.gguf", target, tokenizer, blocks=True)
    for weight in target.state_dict().values():
        if weight.ndim == 2:
            weight.copy_(torch.from_numpy(dequantize(quantize(weight.numpy(), Q8), Q8)))
    torch.testing.assert_close(load_model(blocks)(ids).logits, target(ids).logits)
    assert load_config(blocks).dtype == torch.bfloat16
    assert identity(path)["tensor_digest"] != identity(blocks)["tensor_digest"]


def test_the_rotation_of_llama_3_is_found_by_its_factors(tmp_path, tokenizer):
    target, ids = tiny_llama(0, len(tokenizer), rope_parameters=LLAMA3), torch.arange(200)[None]
    factors = 1e6 ** -(torch.arange(4) / 4) / target.model.rotary_emb.inv_freq
    read = load_model(write(tmp_path / "t.gguf", target, tokenizer, factors=factors))
    torch.testing.assert_close(read(ids).logits, target(ids).logits)
    with pytest.raises(InputError, match=r"found: rope_freqs\.weight, a rotation that the library does not read"):
        load_model(write(tmp_path / "o.gguf", target, tokenizer, factors=factors * 1.1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parts": 2}, "target: expected a GGUF file in one part, found .* of 2: join them with `llama-gguf-split"),
        ({"kind": "oddity"}, "found: GGUF model with architecture oddity is not supported yet"),
        ({"scaling": "yarn"}, "found: positions scaled by yarn, which the library does not read in GGUF files"),
    ],
)
def test_files_that_cannot_be_read_are_refused_in_one_line(tmp_path, tokenizer, given, message):
    with pytest.raises(InputError, match=message) as error:
        load_model(write(tmp_path / "t.gguf", tiny_llama(0, len(tokenizer)), tokenizer, **given), field="target")
    assert "\n" not in str(error.value)
