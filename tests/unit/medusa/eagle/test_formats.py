"""EAGLE-3 heads in the formats of servers and out of those of other tools: round trips, refusals, damage."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from safetensors.torch import load_file, save_file

from draftsmith.decode.errors import InputError
from draftsmith.medusa.eagle.formats.export import FORMATS, eagle_refusal
from draftsmith.medusa.eagle.formats.importing import import_eagle
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.kind import Eagle

VOCAB, LAYERS = 97, 8
MAP = torch.tensor([3, 96, 0, 41, 40, 7, 11])
VARIANTS = {
    "plain": {},
    "cut": {"token_map": MAP},
    "normed": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "normed together": {"norm_before_fc": True, "norm_output": True},
    "normed by depth": {"fc_norm": True, "layer_ids": [1, 3, 5, 7], "token_map": MAP},
    "windowed": {"sliding_window": 2},
    "long": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                                 "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0, VOCAB, layers=LAYERS)


@pytest.fixture
def made(target):
    def make(name: str = "plain") -> EagleHeads:
        torch.manual_seed(3)
        heads = EagleHeads.of_target(target, base_model_name_or_path="org/target", **VARIANTS[name])
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 2 else 1.0))
        return heads.eval()

    return make


def logits(heads: EagleHeads) -> torch.Tensor:
    generator, config = torch.Generator().manual_seed(9), heads.config
    features = torch.randn(1, 5, config.target_hidden_size * len(heads.layer_ids), generator=generator)
    embeddings = torch.randn(1, 5, config.hidden_size, generator=generator)
    with torch.no_grad():
        step = heads(embeddings, heads.fuse(features), torch.arange(5)[None])
        return torch.cat([heads.widened(heads.head(step.hidden))[0], step.states[0]], -1)


def same(a: EagleHeads, b: EagleHeads) -> None:
    """The same weights in the same arithmetic: no tolerance."""
    torch.testing.assert_close(logits(a), logits(b), rtol=0, atol=0)


def rewritten(directory: Path, change) -> None:
    """Change the tensors and the config of a directory in place."""
    weights, path = directory / "model.safetensors", directory / "config.json"
    tensors, config = change(load_file(weights), json.loads(path.read_text()))
    save_file(tensors, weights, metadata={"format": "pt"})
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("format", FORMATS.names)
def test_there_and_back(tmp_path, made, target, format, name):
    heads, given = made(name), target if format == "speculators" else None
    if eagle_refusal(heads, format) is not None:
        assert format == "sglang" and name in ("normed", "windowed")
        return
    FORMATS.write(heads, tmp_path / "out", format, readme="card", target=given)
    assert Eagle().recognises_foreign(tmp_path / "out") and (tmp_path / "out" / "README.md").read_text() == "card"
    read = import_eagle(tmp_path / "out", target=given)
    same(read, heads)
    assert read.layer_ids == heads.layer_ids and read.config.base_model_name_or_path == "org/target"
    FORMATS.write(read, tmp_path / "own", "own")
    same(EagleHeads.from_pretrained(tmp_path / "own"), heads)


def test_both_servers_find_the_depths_as_they_count_them(tmp_path, made):
    notes = FORMATS.write(made("normed by depth"), tmp_path / "out", "vllm")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5, 7] and config["num_aux_hidden_states"] == 4
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4, 6]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["rope_theta"] == 10000.0
    assert notes == ["it drafts 7 of 97 tokens, cut there too (d2t)"]
    FORMATS.write(made("long"), tmp_path / "long", "vllm")
    config = json.loads((tmp_path / "long" / "config.json").read_text())
    assert config["rope_scaling"] == config["rope_parameters"]  # of versions 4 and 5 of the library


@pytest.mark.parametrize("pickled", [False, True])
def test_checkpoints_of_the_authors_and_of_specforge(tmp_path, made, target, pickled):
    """Flat, without depths, with the target's embeddings; the map of ids without its other half."""
    heads = made("cut")
    FORMATS.write(heads, tmp_path / "out", "vllm")

    def theirs(tensors, config):
        found = {f"model.{k}" if "midlayer" in k and not pickled else k: v for k, v in tensors.items() if k != "t2d"}
        found["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
        unknown = ("eagle_aux_hidden_state_layer_ids", "eagle_config", "num_aux_hidden_states", "rope_parameters")
        return found, {name: value for name, value in config.items() if name not in unknown}

    rewritten(tmp_path / "out", theirs)
    if pickled:
        torch.save(load_file(tmp_path / "out" / "model.safetensors"), tmp_path / "out" / "pytorch_model.bin")
        (tmp_path / "out" / "model.safetensors").unlink()
    read = import_eagle(tmp_path / "out", target=target)
    same(read, heads)
    assert read.layer_ids == [2, 4, 5] and torch.equal(read.t2d, heads.t2d)
    with pytest.raises(InputError, match=r"^target: expected it for heads that name no depths, as in .*, found none$"):
        import_eagle(tmp_path / "out")


class Code:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_code_is_not_run(tmp_path, made):
    FORMATS.write(made(), there := tmp_path / "out", "vllm")
    (there / "model.safetensors").unlink()
    for content, said in (({"code": Code(tmp_path / "ran")}, "pickled tensors alone"), ([1, 2], "a state dict, found")):
        torch.save(content, there / "pytorch_model.bin")
        with pytest.raises(InputError, match=f"expected {said}"):
            import_eagle(there)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("format", "depths"), [(None, [2, 4, 5]), ("sglang", [2, 4, 5]), ("vllm", [1, 3, 4])])
def test_depths_in_an_eagle_config_are_counted_as_the_server_counts(tmp_path, made, format, depths):
    FORMATS.write(made(), tmp_path / "out", "sglang")
    rewritten(tmp_path / "out", lambda t, c: (t, {k: v for k, v in c.items() if not k.startswith("eagle_aux")}))
    assert import_eagle(tmp_path / "out", format).layer_ids == depths


def test_checkpoints_of_speculators(tmp_path, made, target):
    """The layer's config nested; the residual path is the normed one where nothing is said."""
    heads = made("cut")
    heads.config.norm_before_residual = heads.midlayer.norm_before_residual = True
    FORMATS.write(heads, tmp_path / "out", "vllm")

    def theirs(tensors, config):
        found = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        found["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().bfloat16()
        found["verifier_lm_head.weight"] = torch.zeros(7, 4)
        outer = {name: config[name] for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
        # fmt: off
        inner = {name: config[name] for name in ("hidden_size", "vocab_size", "num_hidden_layers", "model_type",
                 "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps")}
        # fmt: on
        outer |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "target_hidden_size": None}
        outer["speculators_config"] = {"verifier": {"name_or_path": "org/verifier"}}
        return found, {**outer, "transformer_layer_config": inner}

    rewritten(tmp_path / "out", theirs)
    read = import_eagle(tmp_path / "out", target=target)
    same(read, heads)
    assert read.config.norm_before_residual and read.config.base_model_name_or_path == "org/verifier"
    with pytest.raises(InputError, match=r"^target: expected it for a file that holds embed_tokens"):
        import_eagle(tmp_path / "out")
    nearly = target.get_input_embeddings().weight.detach() * (1 + 1e-6)
    rewritten(tmp_path / "out", with_tensor("embed_tokens.weight", nearly))
    with pytest.raises(InputError, match=r"expected the target's embed_tokens.weight, which is used here, found"):
        import_eagle(tmp_path / "out", target=deepcopy(target).bfloat16())


def without(name):
    return lambda tensors, config: ({k: v for k, v in tensors.items() if k != name}, config)


def with_tensor(name, tensor):
    return lambda tensors, config: (tensors | {name: tensor}, config)


def with_field(**fields):
    return lambda tensors, config: (tensors, config | fields)


DAMAGE = [
    (without("fc.weight"), r"expected the tensors of EAGLE-3 heads, found 1 missing: fc\.weight$"),
    (without("d2t"), r"found 1 missing: d2t$"),
    (with_tensor("midlayer.self_attn.q_norm.weight", torch.ones(4)), r"found 1 not expected: midlayer\.self_attn\.q_"),
    (with_tensor("model.fc.weight", torch.ones(4)), r"expected one tensor fc\.weight, found another by the name of"),
    (with_tensor("norm.weight", torch.full((32,), torch.nan)), r"norm\.weight"),
    (with_tensor("fc.weight", torch.ones(32, 32)), r"expected fc\.weight of shape \(32, 96\), found \(32, 32\)$"),
    (with_tensor("d2t", torch.tensor([0, 0, 0, 0, 0, 0, -1])), r"d2t"),
    (with_tensor("embed_tokens.weight", torch.ones(97, 32)), r"expected the target's embed_tokens"),
    (with_field(num_hidden_layers=2), r"config\.json: num_hidden_layers: expected 1, found 2$"),
    (with_field(model_type="qwen3"), r"config\.json: expected the layer of model_type llama, found 'qwen3'$"),
    (with_field(eagle_aux_hidden_state_layer_ids="x"), r"config\.json: expected eagle_aux_hidden_state_layer_ids as"),
    (with_field(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), r"eagle_aux_hidden_state_layer_ids: expected ascending"),
    (with_field(eagle_config={"use_aux_hidden_state": False}), r"found use_aux_hidden_state false$"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), DAMAGE, ids=[message[:40] for _, message in DAMAGE])
def test_damage_is_told_in_one_line(tmp_path, made, target, change, message):
    FORMATS.write(made("cut"), tmp_path / "out", "vllm")
    rewritten(tmp_path / "out", change)
    with pytest.raises(InputError, match=message) as caught:
        import_eagle(tmp_path / "out", target=target)
    assert "\n" not in str(caught.value)


def test_what_a_server_cannot_hold_is_refused(tmp_path, made, target):
    with pytest.raises(InputError, match=r"^format: expected heads that sglang can hold, found norm_before_residual"):
        FORMATS.write(made("normed"), tmp_path / "out", "sglang")
    deep = EagleHeads.of_target(target, layer_ids=[2, LAYERS])
    assert eagle_refusal(deep, "sglang") is None and eagle_refusal(deep, "vllm", target) is None
    assert eagle_refusal(deep, "sglang", target) == (
        "features after the last of 8 layers, which SGLang does not take; take vllm"
    )
    assert "one depth" in str(eagle_refusal(EagleHeads.of_target(target, layer_ids=[2]), "sglang"))
    with pytest.raises(InputError, match=r"^format: expected one of own, vllm, sglang, speculators, found 'target'$"):
        FORMATS.write(made(), tmp_path / "out", "target")
    with pytest.raises(
        InputError, match=r"^target: expected it for speculators' files, which hold its embeddings, found"
    ):
        FORMATS.write(made(), tmp_path / "out", "speculators")
    both = EagleHeads.of_target(target, norm_before_fc=True, fc_norm=True)
    assert "where speculators takes one" in str(eagle_refusal(both, "speculators"))
    assert not (tmp_path / "out").exists()


def test_an_import_names_a_window(made):
    assert FORMATS.described(made("windowed")).endswith(", a window of 2 positions")
