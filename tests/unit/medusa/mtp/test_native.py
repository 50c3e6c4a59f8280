"""MTP layers in a target's files: every fault is named in one line, at loading and by `doctor`."""

import json
from types import SimpleNamespace

import pytest
import torch
from families import tiny_model
from native_layers import deepseek_names, qwen_names, save_with_mtp
from safetensors.torch import load_file, save_file
from specimens import mtp
from transformers import AutoModelForCausalLM, ExaoneMoeConfig

from draftsmith.decode.errors import InputError
from draftsmith.medusa.mtp.heads import MtpHeads
from draftsmith.medusa.mtp.kind import Mtp
from draftsmith.train.kinds.drafter import DrafterSpec, Loading
from draftsmith.train.models import empty_model, load_model

FILE = "model.safetensors"


def saved(path, family="llama", layers=1, names=qwen_names, field="num_mtp_layers"):
    model = tiny_model(family)
    save_with_mtp(model, mtp(model, layers), names, path, **{field: layers})
    return path


def changed(path, change):
    """Change the tensors of a directory, by name."""
    tensors = load_file(path / FILE)
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path / FILE, {"format": "pt"})


def promising(path, field, value):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {field: value}))


def renamed(tensors):
    tensors["mtp.layers.0.self_attn.query.weight"] = tensors.pop("mtp.layers.0.self_attn.q_proj.weight")


def misshapen(tensors):
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, 1:]


def not_finite(tensors):
    tensors["mtp.norm.weight"][0] = float("nan")


def dropped(part):
    def change(tensors):
        for name in [name for name in tensors if name.startswith(part)]:
            del tensors[name]

    return change


FAULTS = {
    "a name that does not map": (renamed, r"found 1 that do not map: mtp\.layers\.0\.self_attn\.query\.weight$"),
    "a missing tensor": (dropped("mtp.fc"), r"found 1 missing: layers\.0\.eh_proj\.weight$"),
    "a promise without tensors": (dropped("mtp."), r"expected the tensors of 1 MTP layers in .*, found those of 0$"),
    "another shape": (misshapen, r"expected whole tensors of MTP layers in .*, found others for layers\.0\.eh_proj"),
    "no number": (not_finite, r"expected finite weights in .*, found NaN or infinity in 0\.post_norm\.weight"),
}
AT_LOADING = ("another shape", "no number")


def refused(path, message):
    with pytest.raises(InputError, match=message) as error:
        loading = Loading(str(path), None, dtype="float32")
        Mtp().check(DrafterSpec("mtp"), loading)
        loading.model = load_model(path)
        Mtp().load(DrafterSpec("mtp"), loading)
    assert "\n" not in str(error.value) and str(error.value).startswith("drafter: ")


def diagnosed(path, message=None):
    target = SimpleNamespace(path=str(path), model=empty_model(path, dtype=torch.bfloat16))
    if message is None:
        return Mtp().inspect(DrafterSpec("mtp"), target, False)
    with pytest.raises(InputError, match=message):
        Mtp().inspect(DrafterSpec("mtp"), target, False)
    return None


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(tmp_path, fault):
    change, message = FAULTS[fault]
    changed(saved(tmp_path), change)
    refused(tmp_path, message)
    if fault not in AT_LOADING:
        diagnosed(tmp_path, message)


def test_layers_that_config_and_files_count_differently(tmp_path):
    saved(tmp_path, layers=3, names=deepseek_names(2), field="num_nextn_predict_layers")
    diagnosed(tmp_path)
    promising(tmp_path, "num_nextn_predict_layers", 2)
    diagnosed(tmp_path, r"expected the tensors of 2 MTP layers in .*, found those of 3$")
    promising(tmp_path, "num_nextn_predict_layers", 3)
    changed(tmp_path, dropped("model.layers.3."))
    refused(tmp_path, r"expected the tensors of 3 MTP layers in .*, found layers \[0, 2\]$")


def test_a_target_without_layers_or_without_a_promise(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    refused(tmp_path, "expected a target that ships with MTP layers, found none")
    saved(tmp_path)
    promising(tmp_path, "num_mtp_layers", 0)
    refused(tmp_path, r"expected the number of MTP layers in .*config.json .*, found none, and tensors of 1$")


@pytest.mark.parametrize("part", ["shared_head.head", "embed_tokens"])
def test_copies_of_head_and_embeddings_must_be_the_targets(tmp_path, part):
    saved(tmp_path, "deepseek-v3", 1, deepseek_names(2), "num_nextn_predict_layers")
    own = "lm_head.weight" if "head" in part else "model.embed_tokens.weight"
    changed(tmp_path, lambda tensors: tensors.update({f"model.layers.2.{part}.weight": tensors[own].clone()}))
    MtpHeads.native_to(load_model(tmp_path))
    changed(tmp_path, lambda tensors: tensors[f"model.layers.2.{part}.weight"].add_(1))
    refused(tmp_path, rf"found other model\.layers\.2\.{part}\.weight$")


def test_an_expert_without_a_map_is_found(tmp_path):
    saved(tmp_path, "deepseek-v3", 1, deepseek_names(2), "num_nextn_predict_layers")
    changed(tmp_path, dropped("model.layers.2.mlp.experts.1.up_proj"))
    refused(tmp_path, r"drafter: expected .*MTP layers")


def test_the_targets_config_stays_as_it_is(tmp_path):
    target = load_model(saved(tmp_path, "qwen3-5", field="mtp_num_hidden_layers"))
    before = target.config.to_dict()
    heads = MtpHeads.native_to(target)
    assert target.config.to_dict() == before and not any(p.requires_grad for p in heads.parameters())
    part = diagnosed(tmp_path)
    assert part.text.startswith("1 MTP layer, ") and part.cached_numbers == heads.cached_numbers == 2 * 2 * 8


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (None, "that draftsmith trained"),
        ((2, 2), r"eh_proj\.weight of \(32, 64\)"),
        ((32, 64), r"enorm\.weight of .*None$"),
    ],
)
def test_a_directory_of_other_tensors_is_refused(tmp_path, shape, said):
    save_file({} if shape is None else {"layers.0.eh_proj.weight": torch.zeros(shape)}, tmp_path / FILE)
    with pytest.raises(InputError, match=f"^mtp: expected .*{said}"):
        MtpHeads.from_directory(str(tmp_path), tiny_model("llama"))


def test_a_target_other_than_its_own_is_refused():
    heads = MtpHeads.of_target(tiny_model("llama"))
    with pytest.raises(InputError, match="mtp: expected the target that the layers are tied to, found another"):
        heads.check_fits(tiny_model("llama"))
    assert torch.equal(heads.layers[0].eh_proj.weight[:, 32:], torch.eye(32))


def test_layers_without_types_in_the_config_are_known_by_their_names(tmp_path):
    """EXAONE's: dense layers next to experts, with the window of the target's first layer."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 97, "num_experts": 4}
    shape |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "first_k_dense_replace": 1}
    model = AutoModelForCausalLM.from_config(ExaoneMoeConfig(**shape), dtype=torch.float32)
    model.config.mtp_layer_types, model.config.mtp_mlp_layer_types = ["sliding_attention"], ["dense"]
    written = mtp(model)
    save_with_mtp(model, written, qwen_names, tmp_path, num_nextn_predict_layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    kept = {name: value for name, value in config.items() if not name.startswith("mtp_")}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    heads = MtpHeads.native_to(load_model(tmp_path))
    assert heads.config.layer_types == ["sliding_attention"]
    assert all(torch.equal(part, written.state_dict()[name]) for name, part in heads.state_dict().items())
    assert diagnosed(tmp_path).text.startswith("1 MTP layer, ")


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("deepseek-v32", "without an index, found those of DeepseekV32"),
        ("inkling", ""),
        ("gemma2", "by scaled products alone, found softcap"),
        ("qwen3-5", "of full_attention or sliding_attention, found"),
    ],
)
def test_layers_that_cannot_be_unrolled_are_refused_in_one_line(family, said):
    target = tiny_model(family)
    if family == "qwen3-5":
        target.config.mtp_layer_types = ["linear_attention"]
    with pytest.raises(InputError, match=f"expected .*{said}") as error:
        heads, ids = MtpHeads.of_target(target), torch.arange(2, 9)[None]
        states = target(ids, output_hidden_states=True).hidden_states[-1]
        heads.unroll(heads.embed(ids), states, torch.arange(7)[None], 1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-5"])
def test_scaled_layers_scale_their_logits_alone(family):
    """Also of families whose norms add 1 to their weight; the next step sees no difference, and the target none."""
    target = tiny_model(family)
    heads, ids = MtpHeads.of_target(target), torch.arange(2, 9)[None]
    states = target(ids, output_hidden_states=True).hidden_states[-1]
    found = []
    for _ in range(2):
        found.append(heads.unroll(heads.embed(ids), states, torch.arange(7)[None], 3))
        heads.scale(0.5)
    for before, after in zip(*found, strict=True):
        torch.testing.assert_close(after, before / 2, atol=1e-4, rtol=1e-4)
