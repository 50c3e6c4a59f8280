"""Broken model files: each is refused in one line that names the field, the file and what is wrong with it."""

import json
import logging
import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftsmith.decode.errors import InputError, lacks_memory
from draftsmith.medusa import MedusaHeads
from draftsmith.train.checkpoint import check_rope, check_rope_keys, integer_weight, reading_errors, stored_tensors
from draftsmith.train.models import empty_model, load_model, load_tokenizer

WEIGHTS = "model.safetensors"


def write(name: str, content: bytes | str):
    return lambda path: (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def config(**values):
    def change(path):
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def tensors(change):
    return lambda path: save_file(change(load_file(path / WEIGHTS)), path / WEIGHTS, {"format": "pt"})


def one_tensor(name: str, value: float):
    def change(state):
        state[name][3] = value
        return state

    return tensors(change)


def sharded(weight_map):
    """Name the weights as shards are named, under an index that says this."""

    def change(path):
        (path / WEIGHTS).rename(path / "model-00001-of-00002.safetensors")
        write(f"{WEIGHTS}.index.json", weight_map if isinstance(weight_map, str) else json.dumps(weight_map))(path)

    return change


def pickled(content):
    def change(path):
        (path / WEIGHTS).unlink()
        torch.save(content, path / "pytorch_model.bin")

    return change


class Planted:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def shards(*names: object) -> dict:
    return {"weight_map": {f"tensor{i}": name for i, name in enumerate(names)}}


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
DAMAGES = {
    "truncated": (lambda path: os.truncate(path / WEIGHTS, 1000), "found a damaged model.safetensors: "),
    "no weights": (lambda path: (path / WEIGHTS).unlink(), "Error no file named model.safetensors"),
    "another vocabulary": (config(vocab_size=400), r"found lm_head.weight of \(300, 32\) in place of \(400, 32\)"),
    "another width": (config(hidden_size=64), "expected weights of the shapes in config.json"),
    "more layers": (config(num_hidden_layers=3), "found none of model.layers.2.input_layernorm.weight and 8 more"),
    "fewer layers": (config(num_hidden_layers=1), "the 1 layers .* found model.layers.1.input_layernorm.weight and 8"),
    "no layers": (config(num_hidden_layers=-1), "num_hidden_layers of .*: expected at least 1, found -1"),
    "no positions": (config(max_position_embeddings=0), "max_position_embeddings of .*: expected at least 1, found 0"),
    "an unknown activation": (config(hidden_act="none such"), "expected a causal LM in .* KeyError: 'none such'"),
    "a number in words": (config(hidden_size="wide"), "expected a causal LM in .*'hidden_size'"),
    "a list": (write("config.json", "[1, 2]"), r"expected a JSON object in .*config.json, found: \[1, 2\]"),
    "a deep nest": (write("config.json", '{"a":' * 50_000), "expected a JSON object in .*nested too deeply"),
    "a missing shard": (sharded(shards(FIRST, SECOND)), f"found 1 of 2 files missing, the first {SECOND}"),
    "an index that is none": (sharded("{"), f"{WEIGHTS}.index.json: expected JSON, found: "),
    "an index of numbers": (sharded(shards(3)), f"{WEIGHTS}.index.json: weight_map.*: expected a text, found 3"),
    "an index that leads elsewhere": (
        sharded(shards(FIRST, "../draft/model.safetensors")),
        "expected files next to it, found '../draft/model.safetensors'",
    ),
    "planted code": (pickled({"weight": Planted()}), "found: pickled objects other than tensors, or damage"),
    "a missing tensor": (tensors(lambda t: {k: t[k] for k in t if k != "model.norm.weight"}), "none of model.norm"),
    "not a number": (one_tensor("model.embed_tokens.weight", float("nan")), "NaN or infinity in model.embed_tokens"),
    "infinity": (one_tensor("model.norm.weight", float("inf")), r"NaN or infinity in model.norm.weight \(float32\)"),
    "integers": (tensors(lambda t: {k: v.to(torch.int8) for k, v in t.items()}), "found .*weight in I8"),
    "no generation config": (write("generation_config.json", "{"), "expected a generation_config.json in "),
    "an end in words": (write("generation_config.json", '{"eos_token_id": "x"}'), "expected ids as eos_token_id"),
}  # fmt: skip


def refusal(work) -> str:
    with pytest.raises(InputError) as error:
        work()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model_is_refused_in_one_line(pair_dirs, monkeypatch, capfd, name):
    damage, named = DAMAGES[name]
    monkeypatch.chdir(pair_dirs[0])
    damage(pair_dirs[0])
    capfd.readouterr()
    said = refusal(lambda: load_model(pair_dirs[0], field="target"))
    assert said.startswith("target: ") and str(pair_dirs[0]) in said and re.search(named, said), said
    assert not os.path.exists("executed")
    assert not capfd.readouterr().err  # nor does the library say it at length


@pytest.mark.parametrize("content", ["{}", "[]", "{", "", '{"added_tokens": [], "model": {"type": "none such"}}'])
def test_a_damaged_tokenizer_is_refused_in_one_line(pair_dirs, content):
    write("tokenizer.json", content)(pair_dirs[0])
    said = refusal(lambda: load_tokenizer(pair_dirs[0], field="draft"))
    assert said.startswith(f"draft: expected a tokenizer in {pair_dirs[0]}, found: ")


def test_weights_go_straight_to_where_they_stay(pair_dirs, monkeypatch):
    """By way of the host's memory each process of a node would hold the whole model there."""
    asked: list[dict] = []
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda path, **options: asked.append(options))
    for device in ("meta", "cpu"):  # the first stands for a GPU
        with pytest.raises(TypeError):  # nothing was loaded
            load_model(pair_dirs[0], dtype="float32", device=device)
    assert asked[0]["device_map"] == {"": "meta"} and "device_map" not in asked[1]


@pytest.mark.parametrize("load", [load_model, load_tokenizer, empty_model])
def test_a_damaged_config_is_named_as_that(pair_dirs, load):
    config(hidden_size="wide")(pair_dirs[0])
    assert refusal(lambda: load(pair_dirs[0], field="draft")).startswith("draft: expected a causal LM in ")


def test_weights_that_no_layer_wants_are_told_of(pair_dirs, caplog):
    tensors(lambda t: t | {"vision.weight": torch.ones(2)})(pair_dirs[0])
    with caplog.at_level(logging.WARNING):
        load_model(pair_dirs[0], field="target")
    told = f"target: {pair_dirs[0]} holds weights that a LlamaForCausalLM does not use: vision.weight"
    assert [record.message for record in caplog.records] == [told]


def test_integers_that_the_config_says_how_to_read_are_weights(pair_dirs):
    model = load_model(pair_dirs[0])
    tensors(lambda t: {k: v.to(torch.int8) for k, v in t.items()})(pair_dirs[0])
    stored = stored_tensors(pair_dirs[0], "target")
    assert integer_weight(model, stored) == "model.embed_tokens.weight"
    model.config.quantization_config = {"quant_method": "gptq"}
    assert integer_weight(model, stored) is None


def test_heads_that_are_not_finite_are_refused(target, tmp_path):
    heads = MedusaHeads.of_target(target, 2)
    heads.lm_heads[1].weight.data[0, 0] = float("nan")
    heads.save_pretrained(tmp_path)
    assert "NaN or infinity in lm_heads.1.weight" in refusal(lambda: MedusaHeads.from_pretrained(tmp_path))


def test_a_lack_of_memory_is_no_damage():
    with pytest.raises(RuntimeError) as error, reading_errors("target", "a causal LM"):
        torch.empty(1 << 60)
    assert lacks_memory(error.value) and lacks_memory(MemoryError()) and not lacks_memory(ValueError("x"))


def test_only_configs_of_ours_are_searched_for_misspelt_keys_of_a_rotation():
    keys = {"rope_type": "yarn", "factor": 2.0, "attn_factor": 1.0, "max_position_embeddings": 64}
    check_rope({"rope_parameters": keys | {"beta_fasts": 2.0}})
    check_rope_keys({"rope_parameters": keys})
    with pytest.raises(InputError, match="expected beta_fast, found beta_fasts"):
        check_rope_keys({"rope_parameters": keys | {"beta_fasts": 2.0}})
