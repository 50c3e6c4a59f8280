"""Medusa heads in the formats of others: round trips, hand-made directories, refusals, damage."""

import errno
import itertools
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import tiny_llama
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, silu

from draftsmith.decode.errors import InputError
from draftsmith.medusa import MedusaHeads
from draftsmith.medusa.heads.formats.export import FORMATS as ALL
from draftsmith.medusa.heads.formats.export import refusal
from draftsmith.medusa.heads.formats.importing import detect, import_heads

H, V, K = 32, 97, 3
MAP = torch.tensor([3, 96, 0, 41, 40, 7, 11])
CHOICES = [[0], [0, 0], [1], [0, 1]]


def noisy(heads: MedusaHeads, seed: int = 3) -> MedusaHeads:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 2 else 1.0))
    return heads.eval()


def made(
    layers: int = 1, shared: bool = False, bias: bool = False, token_map=None, hydra=False, **config
) -> MedusaHeads:
    heads = MedusaHeads.of_target(
        tiny_llama(),
        K,
        token_map,
        num_hidden_layers=layers,
        original_lm_head=shared,
        medusa_fc_bias=bias,
        hydra=hydra,
        base_model_name_or_path="org/target",
    )
    for name, value in config.items():
        setattr(heads.config, name, value)
    return noisy(heads)


def hidden() -> torch.Tensor:
    return torch.randn(5, H, generator=torch.Generator().manual_seed(9))


def logits(heads: MedusaHeads) -> torch.Tensor:
    with torch.no_grad():
        return heads(hidden(), torch.ones(5, K, H)).float()


def same(a: MedusaHeads, b: MedusaHeads) -> None:
    """Float32 sums of 32 terms: 1e-6 of logits of size 10."""
    torch.testing.assert_close(logits(a), logits(b), rtol=1e-5, atol=1e-5)


def same_drafts(whole: MedusaHeads, narrow: MedusaHeads) -> None:
    """The logits of a cut vocabulary are there, and none of the others is the largest."""
    assert whole.config.truncated_vocab_size == V and whole.token_map is None
    many = torch.randn(500, H, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found, expected = whole(many), narrow(many)
    torch.testing.assert_close(found[..., MAP], expected[..., MAP], rtol=1e-5, atol=1e-5)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def export(heads: MedusaHeads, directory: Path, format: str, **options) -> Path:
    ALL.write(heads, directory, format, **options)
    return directory


def edit_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def save(directory: Path, content: dict[str, torch.Tensor]) -> None:
    save_file(content, directory / "model.safetensors", metadata={"format": "pt"})


ROUND_TRIPS = itertools.product(ALL.names, (1, 2), (False, True), (False, True), (False, True))


@pytest.mark.parametrize(("format", "layers", "shared", "bias", "narrow"), ROUND_TRIPS)
def test_there_and_back(tmp_path, format, layers, shared, bias, narrow):
    heads = made(layers, shared, bias, MAP if narrow else None)
    there = export(heads, tmp_path / "there", format)
    assert detect(there) == format
    read = import_heads(there)
    if format == "vllm" and narrow:
        same_drafts(read, heads)
        heads = read
    same(read, heads)
    assert read.config.base_model_name_or_path == "org/target" and not read.training
    back = import_heads(export(read, tmp_path / "back", "own"), "own")
    same(back, heads)
    for name in ("num_heads", "num_hidden_layers", "hidden_size", "vocab_size", "truncated_vocab_size"):
        assert getattr(back.config, name) == getattr(heads.config, name)
    assert back.config.original_lm_head is shared and back.config.medusa_fc_bias is bias
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "there"]


@pytest.mark.parametrize("format", ALL.names)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lower_precision_is_the_rounded_weights(tmp_path, format, dtype):
    heads, kind = made(logit_scale=0.25), getattr(torch, dtype)
    there = export(heads, tmp_path / "there", format, dtype=dtype)
    read = import_heads(there)
    assert read.dtype == kind and heads.dtype == torch.float32
    assert {tensor.dtype for tensor in tensors(there).values()} == {kind}
    config = json.loads((there / "config.json").read_text())
    assert config["dtype" if format == "own" else "torch_dtype"] == dtype
    same(read.float(), heads.to(kind).float())


def test_our_own_format_holds_what_no_other_does(tmp_path):
    heads = made(2, bias=True, hydra=True, final_logit_softcapping=5.0, logit_scale=0.5, medusa_choices=CHOICES)
    assert ALL.write(heads, tmp_path / "own", "own") == []
    back = import_heads(tmp_path / "own")
    same(back, heads)
    assert back.config.medusa_choices == CHOICES
    biased = noisy(MedusaHeads(type(heads.config)(hidden_size=H, vocab_size=V, num_heads=K, lm_head_bias=True)))
    same(import_heads(export(biased, tmp_path / "biased", "own")), biased)


def test_the_config_of_vllm(tmp_path):
    heads = made(2, True, True, MAP, logit_scale=0.5)
    (note,) = ALL.write(heads, there := tmp_path / "v", "vllm", dtype="bfloat16")
    assert f"heads of {len(MAP)} tokens are written with all {V}" in note and "save no memory" in note
    assert json.loads((there / "config.json").read_text()) == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": H,
        "vocab_size": V,
        "num_heads": K,
        "num_hidden_layers": 2,
        "truncated_vocab_size": V,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "logit_scale": 0.5,
        "base_model_name_or_path": "org/target",
        "torch_dtype": "bfloat16",
    }
    blocks = {f"blocks.{h}.layers.{i}.{p}" for h in range(K) for i in range(2) for p in ("weight", "bias")}
    assert set(tensors(there)) == blocks | {"lm_head.weight"} and heads.config.truncated_vocab_size == len(MAP)
    head = tensors(there)["lm_head.weight"]
    others = [token for token in range(V) if token not in MAP]
    assert head.shape == (V, H) and head[others].unique(dim=0).shape == (1, H)
    torch.testing.assert_close(head[others[0]].float(), head[MAP].float().mean(0), rtol=0.01, atol=0.001)
    ALL.write(made(token_map=MAP[:2], shared=True), tmp_path / "least", "vllm", dtype="float16")


def test_what_vllm_lacks_is_left_out_told_and_keeps_the_order_of_logits(tmp_path):
    heads = made(final_logit_softcapping=30.0, logit_scale=0.5, medusa_choices=CHOICES)
    notes = ALL.write(heads, tmp_path / "x", "vllm")
    read = import_heads(tmp_path / "x")
    assert torch.equal(logits(read).argsort(-1), logits(heads).argsort(-1))
    assert read.config.medusa_choices is None and read.config.logit_scale == 0.5
    assert any(note.startswith("final_logit_softcapping is left out") for note in notes)
    assert any("the tree of 4 tokens is not written" in note for note in notes)


# --- hand-made directories, each as its documentation has it ---


def randoms(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) * 0.3 for shape in shapes]


def directory(path: Path, config: dict, files: dict[str, dict[str, torch.Tensor]]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        save_file(content, path / name)
    return path


def by_hand(weights, biases, head_weights) -> torch.Tensor:
    out = []
    for weight, bias, head in zip(weights, biases, head_weights, strict=True):
        x = hidden()
        out.append(linear(x + silu(linear(x, weight, bias)), head))
    return torch.stack(out, 1)


VLLM = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": H, "vocab_size": V}


def test_reads_a_vllm_directory(tmp_path):
    a, b, p, q = randoms((H, H), (H, H), (V, H), (V, H))
    blocks = {"blocks.0.layers.0.weight": a, "blocks.1.layers.0.weight": b}
    content = blocks | {"lm_heads.0.weight": p, "lm_heads.1.weight": q}

    def read(name: str, tensors: dict[str, torch.Tensor], **config) -> torch.Tensor:
        there = directory(tmp_path / name, VLLM | config, {"model.safetensors": tensors})
        return logits(import_heads(there))

    expected = by_hand((a, b), (None, None), (p, q))
    shape = {"num_heads": 2, "num_hidden_layers": 1}
    torch.testing.assert_close(read("plain", content, **shape, truncated_vocab_size=V), expected)
    # vLLM renames such keys, and drops this prefix.
    renamed = {f"medusa_heads.{name}": tensor for name, tensor in content.items()}
    found = read("renamed", renamed, medusa_num_heads=2, medusa_num_layers=1, logit_scale=2)
    torch.testing.assert_close(found, 2 * expected)
    # It cuts heads of the whole vocabulary, and takes the first of them for the one that all share.
    cut = blocks | {"lm_heads.0.weight": p, "token_map": MAP.to(torch.int32)}
    found = read("cut", cut, **shape, truncated_vocab_size=len(MAP), original_lm_head=True)
    torch.testing.assert_close(found[..., MAP], by_hand((a, b), (None, None), (p, p))[..., MAP])
    assert found.isinf().sum() == 5 * 2 * (V - len(MAP))


def test_reads_weights_in_several_files(tmp_path):
    heads = made()
    there = export(heads, tmp_path / "m", "vllm")
    whole, names = tensors(there), ("model-1.safetensors", "model-2.safetensors")
    (there / "model.safetensors").unlink()
    index = {"weight_map": {name: names["blocks" in name] for name in whole}}
    for file in names:
        save_file({name: whole[name] for name, place in index["weight_map"].items() if place == file}, there / file)
    (there / "model.safetensors.index.json").write_text(json.dumps(index))
    same(import_heads(there), heads)
    (there / names[1]).unlink()
    with pytest.raises(InputError, match=r"model-2\.safetensors: expected safetensors, found: .*No such file"):
        import_heads(there)


# --- damage ---


def refused(there: Path, message: str, *arguments, **options) -> None:
    with pytest.raises(InputError, match=message) as error:
        import_heads(there, *arguments, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("format", ALL.names)
def test_missing_unexpected_misshapen_tensors_and_cut_files(tmp_path, format):
    there = export(made(bias=True), tmp_path / "x", format)
    whole = tensors(there)
    for name in list(whole)[:2]:
        save(there, {k: v for k, v in whole.items() if k != name})
        refused(there, rf"^{there}: expected .* found .*{name}")
    save(there, whole | {"lm_head.weight": torch.zeros(V, H)})
    refused(there, r"found 1 not expected: lm_head\.weight")
    name = next(name for name in whole if ".1." in name and name.endswith("weight"))
    save(there, whole | {name: whole[name][:-1].contiguous()})
    refused(there, rf"{name}|shape")
    save(there, whole | {name: whole[name].to(torch.int8)})
    refused(there, rf"expected {name} in a floating-point type, found int8")
    (weights,) = (path for path in there.iterdir() if path.name != "config.json")
    for share in (0.99, 0):
        weights.write_bytes(weights.read_bytes()[: int(share * weights.stat().st_size)])
        refused(there, str(there))


@pytest.mark.parametrize(
    ("format", "changes", "message"),
    [
        ("own", {"num_heads": 4}, "found 3 missing: blocks.3"),
        ("own", {"dtype": "float99"}, "config.json: "),
        ("own", {"final_logit_softcapping": "x"}, "final_logit_softcapping as float, found 'x'"),
        ("own", {"hydra": 1}, "expected hydra as bool, found 1"),
        ("own", {"num_heads": "3"}, "num_heads: expected at least 1, found '3'"),
        ("vllm", {"hidden_size": None}, "expected hidden_size, found none"),
        ("vllm", {"num_heads": "3"}, "expected num_heads as int, found '3'"),
        ("vllm", {"num_attention_heads": 4}, "expected one num_heads, found num_heads 3, num_attention_heads 4"),
        ("vllm", {"medusa_fc_bias": False}, "expected medusa_fc_bias true with biases"),
        ("vllm", {"truncated_vocab_size": V + 1}, "truncated_vocab_size: expected at most"),
        ("vllm", {"truncated_vocab_size": 7}, "found 1 missing: token_map"),
        ("own", {"medusa_choices": [[0], [0, 0, 0]]}, "config.json: "),
    ],
)
def test_configs_that_cannot_be(tmp_path, format, changes, message, target):
    there = export(made(bias=True), tmp_path / "x", format)
    edit_config(there, **changes)
    refused(there, rf"{there}.*{message}", target=target)


def test_a_token_map_that_names_no_token(tmp_path):
    there = export(made(), tmp_path / "x", "vllm")
    edit_config(there, truncated_vocab_size=len(MAP))  # as vLLM's model describes it, though 0.32 loads none
    wide = {name: tensor for name, tensor in tensors(there).items() if name.startswith("lm_heads")}
    whole = tensors(there) | {name: tensor[MAP].clone() for name, tensor in wide.items()}
    for odd, message in (
        (MAP + 10, "token_map"),
        (MAP - 1, "token_map"),
        (torch.zeros(7, dtype=torch.int64), "token_map"),
        (MAP.float(), "expected token_map in integers, found float32"),
    ):
        save(there, whole | {"token_map": odd})
        refused(there, message)


def test_unknown_directories(tmp_path):
    there = export(made(), tmp_path / "x", "vllm")
    edit_config(there, model_type=None)
    refused(there, "expected Medusa heads in one of own, vllm, found neither")
    refused(there, "^format: expected one of own, vllm, found 'sglang'", "sglang")
    (there / "config.json").unlink()
    refused(there, r"expected Medusa heads with config\.json")
    refused(tmp_path / "nowhere", "expected a directory of Medusa heads, found none")
    refused(export(made(), tmp_path / "v", "vllm"), "hidden_size 64, found 32", target=tiny_llama(hidden=64))


# --- what a format cannot say ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hydra": True}, "Hydra heads"),
        ({"lm_head_bias": True}, "a bias"),
        ({"token_map": MAP[:1]}, "a truncated vocabulary of 1 tokens; keep draftsmith's own format"),
    ],
)
def test_refusals_name_a_way_out_and_write_nothing(tmp_path, options, message):
    heads = made(**options)
    assert refusal(heads, "own") is None
    with pytest.raises(InputError, match=rf"^format: expected heads that vllm can hold, found .*{message}"):
        ALL.write(heads, tmp_path / "x", "vllm")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    heads = made()
    heads.blocks[1].layers[0].weight.data[0, 0] = 1e6
    with pytest.raises(InputError, match=r"finite in float16, found others in blocks\.1\.layers\.0\.weight"):
        ALL.write(heads, tmp_path / "y", "vllm", dtype="float16")
    monkeypatch.setattr("draftsmith.medusa.formats.save_file", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(InputError, match=r"^output: expected to write in .*No space left"):
        ALL.write(heads, tmp_path / "x", "vllm")
    assert not list(tmp_path.iterdir())


def test_outputs_that_hold_something_stay_as_they_are(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine").write_text("kept")
    for name in ("x", "x/mine"):
        with pytest.raises(InputError, match=r"^output: expected a new or empty directory"):
            ALL.write(made(), tmp_path / name, "own")
    assert (tmp_path / "x" / "mine").read_text() == "kept"
    (tmp_path / "empty").mkdir()
    ALL.write(made(), tmp_path / "empty", "own", readme="# Card")
    assert (tmp_path / "empty" / "README.md").read_text() == "# Card"
    ALL.write(made(), tmp_path / "a" / "b" / "c", "own")
