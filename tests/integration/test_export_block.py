"""`draftsmith export` with block drafters: every format and the way back, files of other tools, launch lines."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.decode.errors import InputError
from draftsmith.medusa.block.formats.export import FORMATS
from draftsmith.medusa.block.formats.importing import import_block, read_block_config
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.scripts import cli
from draftsmith.train.models import load_model

SHAPES = {
    "DSpark": {"markov_rank": 4, "block_size": 3},
    "DSpark, confident": {"markov_rank": 4, "block_size": 3, "enable_confidence_head": True},
    "its anchor guesses nothing": {"markov_rank": 4, "block_size": 4, "anchor_guesses": False},
    "DFlash": {"block_size": 4, "anchor_guesses": False, "layers": 2},
    "Domino": {"block_size": 4, "layers": 2, "emb_dim": 4, "gru_hidden_dim": 6, "pure_draft_prefix_len": 1},
    "Domino, fill-in": {"block_size": 4, "anchor_guesses": False, "emb_dim": 3, "gru_hidden_dim": 5},
}
DFLASH2 = {"block_size": 4, "anchor_guesses": False, "selector_rank": 4, "selector_top_k": 5, "conv_kernel_size": 2}
SHAPES["DFlash 2"] = DFLASH2 | {"layers": 2, "conv_kernel_size": 3, "conv_group_size": 4}
KINDS = ["sliding_attention", "full_attention"]
WINDOWS = {
    "DFlash, a window": {"block_size": 2, "anchor_guesses": False, "sliding_window": 3},
    "DFlash, windows": SHAPES["DFlash"] | {"block_size": 2, "layer_types": KINDS, "sliding_window": 2},
    "DFlash, two-sided": SHAPES["DFlash"] | {"layer_types": KINDS, "sliding_window": 4, "is_causal": False},
    "DFlash, causal": SHAPES["DFlash"] | {"layer_types": KINDS, "sliding_window": 4, "is_causal": True},
    "DSpark, a window": {"markov_rank": 4, "block_size": 2, "sliding_window": 2},
    "DSpark, two-sided": {"markov_rank": 4, "block_size": 3, "sliding_window": 3, "is_causal": False},
    "DFlash 2, two-sided": DFLASH2 | {"sliding_window": 4, "is_causal": False},
}
SHAPES |= WINDOWS
REFUSED = {
    ("DFlash, causal", "speculators"): "is_causal in layers of full_attention, which speculators does not have",
    **{
        (name, "sglang"): "found a candidate selector, which SGLang 0.5.23 is not known to load; take vllm$"
        for name in ("DFlash 2", "DFlash 2, two-sided")
    },
    **{
        (name, format): "found Domino's recurrent head, which vLLM 0.32 and speculators 0.9 do not know; take sglang$"
        for name in ("Domino", "Domino, fill-in")
        for format in ("vllm", "speculators")
    },
    ("Domino, fill-in", "sglang"): "found a pure_draft_prefix_len of 0, where SGLang decodes 1 alone; take own$",
    ("DSpark, two-sided", "vllm"): "is_causal False, which DeepSpec's files cannot say; take speculators",
}
CUT = {"DSpark, cut": {"markov_rank": 4, "block_size": 3}, "DFlash, cut": {"block_size": 3, "anchor_guesses": False}}
SERVED, EVEN = ("vllm", "speculators"), torch.arange(0, 40, 2)
SPECULATORS_VERIFIER = ("verifier_lm_head.weight", "verifier_norm.weight")


def ran(capsys, *argv: object, code: int = 0) -> tuple[list[str], str]:
    assert cli.main(["export", *map(str, argv)]) == code
    out, err = capsys.readouterr()
    return out.splitlines(), err


@pytest.fixture
def target(pair_dirs):
    return load_model(pair_dirs[0], dtype="float32", device="cpu")


def made(target, name: str) -> BlockDrafter:
    """A drafter whose every tensor says something."""
    torch.manual_seed(0)
    ids = torch.arange(0, target.config.vocab_size, 2) if name in CUT else None
    shape = (SHAPES | CUT)[name]
    drafter = BlockDrafter.of_target(target, 3, token_map=ids, layer_ids=[0, 1], **shape)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return drafter


def same(one: BlockDrafter, two: BlockDrafter) -> None:
    torch.testing.assert_close(one.state_dict(), two.state_dict(), rtol=0, atol=0)
    names = ("target_layer_ids", "mask_token_id", "block_size", "anchor_guesses", "markov_rank", "rope_parameters")
    names += ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
    names += ("layer_types", "sliding_window", "is_causal")
    names += ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")
    for name in (*names, "enable_confidence_head", "draft_vocab_size", "vocab_size", "num_hidden_layers"):
        assert getattr(one.config, name) == getattr(two.config, name), name


@pytest.mark.parametrize("format", ["own", "vllm", "speculators", "sglang"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_format_comes_back_as_it_was(target, tmp_path, name, format):
    drafter = made(target, name)
    if (format == "sglang" and name not in ("DFlash", "Domino")) or (name, format) in REFUSED:
        said = (
            "which SGLang is not known" if name in WINDOWS else r"DSpark's heads, which SGLang .* not load; take vllm$"
        )
        with pytest.raises(InputError, match=REFUSED.get((name, format), said)):
            FORMATS.write(drafter, tmp_path / "out", format)
        return
    FORMATS.write(drafter, tmp_path / "out", format)
    same(import_block(tmp_path / "out"), drafter)
    if format == "own":
        same(BlockDrafter.from_pretrained(tmp_path / "out"), drafter)


@pytest.mark.parametrize(
    ("name", "format"),
    [(name, format) for name in ("DSpark, cut", "DFlash, cut") for format in ("vllm", "speculators")],
)
def test_a_cut_vocabulary_takes_the_targets_rows_along(target, tmp_path, name, format):
    drafter = made(target, name)
    with pytest.raises(InputError, match=r"^target: expected it with a cut vocabulary, .*, found none$"):
        FORMATS.write(drafter, tmp_path / "out", format)
    FORMATS.write(drafter, tmp_path / "out", format, target=target)
    written = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(written["lm_head.weight"], target.lm_head.weight[::2])
    assert ("t2d" in written) == (format == "speculators")
    same(import_block(tmp_path / "out", target=target), drafter)
    with pytest.raises(InputError, match=r"^target: expected it for a file that holds lm_head.weight"):
        import_block(tmp_path / "out")
    target.lm_head.weight.data[0] += 1
    with pytest.raises(InputError, match=r"expected the target's lm_head.weight, which is used here, found another$"):
        import_block(tmp_path / "out", target=target)


def flat(path: Path) -> dict:
    return json.loads((path / "config.json").read_text())


def rewritten(path: Path, config: dict, tensors: dict | None = None) -> None:
    (path / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_files_as_other_tools_leave_them(target, tmp_path):
    """z-lab's has the rotation by older names, DeepSpec's copies of the target's ends, speculators' of what it read."""
    dflash, dspark = made(target, "DFlash"), made(target, "DSpark, confident")
    zlab, deepspec, speculators = (tmp_path / name for name in ("zlab", "deepspec", "speculators"))
    FORMATS.write(dflash, zlab, "vllm")
    config = flat(zlab) | {
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "rope_scaling": None,
        "dtype": "float32",
    }
    rewritten(
        zlab, {name: value for name, value in config.items() if name not in ("rope_parameters", "draft_vocab_size")}
    )
    same(import_block(zlab), dflash)
    rewritten(zlab, config | {"dflash_config": {"mask_token_id": 3}})  # SpecForge's default layers
    assert read_block_config(zlab).target_layer_ids == [1]  # of two layers

    FORMATS.write(dspark, deepspec, "vllm")
    ends = {"embed_tokens.weight": target.get_input_embeddings().weight, "lm_head.weight": target.lm_head.weight}
    tensors = load_file(deepspec / "model.safetensors") | {name: end.detach().clone() for name, end in ends.items()}
    config = {k: v for k, v in flat(deepspec).items() if k not in ("sample_from_anchor", "dspark_bonus_anchor")}
    rewritten(deepspec, config | {"num_anchors": 512}, tensors)
    same(import_block(deepspec, target=target), dspark)
    tensors["embed_tokens.weight"][3] = 0.0  # a mask that was trained
    rewritten(deepspec, config, tensors)
    with pytest.raises(InputError, match=r"expected the target's embed_tokens.weight, which is used here, found"):
        import_block(deepspec, target=target)

    FORMATS.write(dspark, speculators, "speculators")
    tensors = load_file(speculators / "model.safetensors")
    tensors |= {name: torch.zeros(2) for name in SPECULATORS_VERIFIER} | {"t2d": torch.ones(7, dtype=torch.bool)}
    rewritten(speculators, flat(speculators), tensors)
    same(import_block(speculators), dspark)
    config = flat(speculators)
    assert config["aux_hidden_state_layer_ids"] == [1, 2] and config["sample_from_anchor"]
    # Its writer leaves out what is Qwen 3's default, such as a window of 4,096.
    config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"], "use_sliding_window": True}
    del config["transformer_layer_config"]["sliding_window"], config["sliding_window_non_causal"]
    rewritten(speculators, config)
    read = import_block(speculators).config
    assert (read.window_of(0), read.causal(0), read.windows) == (4096, True, ", a window of 4096 positions")
    rewritten(speculators, config | {"sliding_window_non_causal": True})
    assert not import_block(speculators).config.causal(0)


@pytest.mark.parametrize(
    ("name", "both_ways"), [("DFlash", True), ("DFlash, a window", False), ("DFlash, two-sided", True)]
)
def test_vllm_lets_layers_of_speculators_files_see_as_much_as_they_learnt_to(target, tmp_path, name, both_ways):
    """vLLM 0.32 takes `sliding_window_non_causal` for all layers of DFlash, of full attention too."""
    FORMATS.write(made(target, name), tmp_path / "out", "speculators")
    assert flat(tmp_path / "out")["sliding_window_non_causal"] == both_ways
    notes = FORMATS.write(made(target, "DFlash, windows"), tmp_path / "mixed", "speculators")
    assert "no slot sees those after it in layers of full_attention either" in notes[-1]
    assert len(FORMATS.write(made(target, "DFlash, windows"), tmp_path / "vllm", "vllm")) == 1


def fields(**changes):
    return lambda config: config | changes


def nested(**changes):
    return lambda config: config | {"dflash_config": config["dflash_config"] | changes}


WRONG = [
    ("DSpark", "vllm", fields(conditioning_source="target_kv"), "conditioning_source"),
    ("DSpark", "speculators", fields(emb_dim=4), "heads: expected one that"),
    ("DSpark", "vllm", fields(attention_mode="kda"), "attention_mode"),
    ("DSpark", "vllm", fields(markov_head_type="gated"), "markov_head_type vanilla, as our drafters are, found"),
    ("DFlash", "vllm", fields(layer_types=KINDS, use_sliding_window=True), "sliding_window: expected the size of the"),
    ("DFlash", "vllm", fields(is_neox_style=False), "is_neox_style True, as our drafters are, found False"),
    ("DFlash", "vllm", nested(causal="no"), "is_causal: expected true, false or null, found 'no'"),
    ("DFlash", "vllm", fields(target_hidden_size=7), r"target_hidden_size \d+, as our drafters are, found 7"),
    ("DFlash", "vllm", fields(model_type="kimi_k2"), "model_type qwen3, as our drafters are, found 'kimi_k2'"),
    ("DFlash", "vllm", nested(mask_token_id=None), "mask_token_id: expected a token below .*, found None"),
    ("DFlash", "vllm", fields(num_hidden_layers=3), r"tensors of a block drafter, found \d+ missing: layers.2"),
    ("DFlash 2", "speculators", fields(conv_group_size=5), "conv_group_size: expected a divisor of the hidden_size 32"),
    ("DFlash 2", "speculators", fields(conv_kernel_size=0), "not expected: layers.0.attention_conv.base_kernel"),
    ("Domino", "sglang", nested(pure_draft_prefix_len=4), "pure_draft_prefix_len: expected at least 0 and at most 3"),
    ("Domino", "sglang", nested(gru_hidden_dim=5), r"prefix_gru.weight_ih_l0 of shape \(15, \d+\), found \(18"),
    ("Domino", "sglang", nested(projector_type="linear"), "projector_type domino, as our drafters are, found 'linear'"),
    ("Domino", "sglang", nested(shift_label=1), "expected shift_label as bool, found 1"),
]


@pytest.mark.parametrize(("name", "format", "change", "message"), WRONG)
def test_what_would_change_the_numbers_is_refused(target, tmp_path, name, format, change, message):
    out = tmp_path / "out"
    FORMATS.write(made(target, name), out, format)
    config = flat(out)
    rewritten(out, change(config))
    with pytest.raises(InputError, match=message) as error:
        import_block(out)
    assert "\n" not in str(error.value)
    rewritten(out, config)
    (out / "mask_embedding.pt").write_bytes(b"")  # a tensor of another tool, beside the others
    with pytest.raises(InputError, match=r"found mask_embedding.pt$"):
        import_block(out)


def test_what_says_nothing_of_the_numbers_is_not_refused(target, tmp_path):
    """Fields of configs of DeepSpec, SpecForge and z-lab, and what is false or empty."""
    FORMATS.write(made(target, "DSpark"), tmp_path / "out", "vllm")
    labels = {"auto_map": {"AutoModel": "x"}, "dtype": "float32", "transformers_version": "5.5.3", "eos_token_id": 7}
    labels |= {"max_window_layers": 5, "use_cache": True, "initializer_range": 0.02, "num_anchors": 512}
    labels |= {"confidence_head_alpha": 1.0, "conditioning_source": None, "attention_mode": "gqa", "unheard_of": []}
    rewritten(tmp_path / "out", flat(tmp_path / "out") | labels)
    same(import_block(tmp_path / "out"), made(target, "DSpark"))


def test_what_dflash_2s_files_say_and_leave_out(target, tmp_path):
    out, zlab = tmp_path / "out", tmp_path / "zlab"
    drafter = made(target, "DFlash 2")
    FORMATS.write(drafter, out, "speculators")
    FORMATS.write(drafter, zlab, "vllm")
    books = {f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor")}
    assert all(books < load_file(path / "model.safetensors").keys() for path in (out, zlab))
    config = flat(zlab)
    assert config["architectures"] == ["DFlash2DraftModel"] and config["dflash_config"]["selector_top_k"] == 5
    config = flat(out)
    assert (config["speculators_model_type"], config["architectures"]) == ("dflash2", ["DFlash2DraftModel"])
    new = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
    rewritten(out, {name: value for name, value in config.items() if name not in new})
    read = read_block_config(out)  # what its library takes for the default
    assert tuple(getattr(read, name) for name in new) == (256, 16, 2, 16)
    FORMATS.write(made(target, "DFlash 2, two-sided"), tmp_path / "windows", "speculators")
    config = flat(tmp_path / "windows")
    rewritten(out, {name: value for name, value in config.items() if name != "sliding_window_non_causal"})
    assert read_block_config(out).causal(0) is False


@pytest.mark.parametrize(
    ("shape", "change", "formats", "message"),
    [
        (DFLASH2, {"conv_kernel_size": 0}, SERVED, "a candidate selector without convolutions, which no file of"),
        (DFLASH2, {"selector_rank": 0, "markov_rank": 2}, SERVED, "convolutions without a candidate selector, which"),
        (DFLASH2, {"anchor_guesses": True}, SERVED, "a candidate selector, and an anchor that guesses: servers know"),
        (DFLASH2, {"enable_confidence_head": True}, SERVED, "a confidence head, which DFlash 2 does not have; train"),
        (DFLASH2, {"token_map": EVEN}, SERVED, "a cut vocabulary, among which other tools' candidate selectors do"),
        (SHAPES["Domino"], {"enable_confidence_head": True}, ["sglang"], "a confidence head, which SpecForge's Domino"),
        (SHAPES["Domino"], {"token_map": EVEN}, ["sglang"], "a cut vocabulary, where SGLang takes the target's head"),
    ],
)
def test_what_other_tools_files_cannot_hold_is_refused(target, tmp_path, shape, change, formats, message):
    drafter = BlockDrafter.of_target(target, 3, layer_ids=[0, 1], **shape | change)
    for format in formats:
        with pytest.raises(InputError, match=message):
            FORMATS.write(drafter, tmp_path, format, target=target)


def test_what_domino_files_say_and_leave_out(target, tmp_path):
    """As SpecForge writes them: the head's tensors at the top."""
    out, drafter = tmp_path / "out", made(target, "Domino")
    FORMATS.write(drafter, out, "sglang")
    config, tensors = flat(out), load_file(out / "model.safetensors")
    assert config["architectures"] == ["DFlashDraftModel"] and config["emb_dim"] == 4
    assert (
        config["dflash_config"] | {"projector_type": "domino", "shift_label": True, "gru_hidden_dim": 6}
        == (config["dflash_config"])
    )
    assert {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight"} < tensors.keys()
    nested = {name: value for name, value in config["dflash_config"].items() if name != "projector_type"}
    rewritten(out, config | {"architectures": ["DominoDraftModel"], "dflash_config": nested})
    same(import_block(out), drafter)
    shifted = {name: value for name, value in config["dflash_config"].items() if name != "shift_label"}
    rewritten(out, config | {"dflash_config": shifted})
    assert not import_block(out).config.anchor_guesses


def test_the_command_writes_tells_and_reads(target, pair_dirs, tmp_path, capsys):
    where, own = pair_dirs[0], tmp_path / "DSpark"
    for name, format, said, tells in (
        ("DSpark", "vllm", "--speculative-config", "# DSpark drafter of 3 tokens, "),
        ("DFlash", "sglang", "--speculative-num-draft-tokens 4", "token 3 for a mask, on the outputs of the target's"),
        ("DFlash 2", "vllm", '"method":"dflash"', "# DFlash2 drafter of 3 tokens, "),
        ("Domino", "sglang", "--speculative-num-draft-tokens 4", "# SGLang drafts 3 of its 4 tokens"),
    ):
        made(target, name).save_pretrained(tmp_path / name)
        (tmp_path / name / "README.md").write_text("its card")
        flags = ["--drafter", tmp_path / name, "--format", format, "--output", tmp_path / f"{name} out"]
        written, _ = ran(capsys, *flags, "--target", where)
        assert said in written[-1] and (tmp_path / f"{name} out" / "README.md").read_text() == "its card"
        back = ["--import_from", tmp_path / f"{name} out", "--output", tmp_path / f"{name} back", "--target", where]
        read, _ = ran(capsys, *back)
        assert any(tells in line for line in [*written, *read])
        same(BlockDrafter.from_pretrained(tmp_path / f"{name} back"), made(target, name))
    given = ["--drafter", own, "--target", where, "--format", "vllm", "--output"]
    lines, _ = ran(capsys, *given, tmp_path / "16 bits", "--dtype", "bfloat16")
    config = json.loads(shlex.split(lines[-1])[-1])
    assert config == {"method": "dspark", "model": str(tmp_path / "16 bits"), "num_speculative_tokens": 3}
    assert {tensor.dtype for tensor in load_file(tmp_path / "16 bits/model.safetensors").values()} == {torch.bfloat16}
    for length in (2, 4):
        _, err = ran(capsys, *given, tmp_path / "no", "--draft_length", length, code=2)
        assert f"draft_length: expected the 3 tokens of a block, whose slots all see each other, found {length}" in err
