"""What a config of heads says twice, and what their files hold: all doors take and refuse the same."""

import json
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from safetensors.torch import load_file, save_file

from draftsmith.decode.errors import InputError
from draftsmith.medusa.block.formats.importing import import_block
from draftsmith.medusa.block.kind import Block
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.eagle.formats.importing import import_eagle
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.kind import Eagle
from draftsmith.train.kinds.drafter import DrafterSpec
from draftsmith.train.models import empty_model

VOCAB, POSITIONS = 97, 512
TOKENS = torch.arange(40)
KINDS = {"eagle": (EagleHeads, import_eagle, Eagle()), "block": (BlockDrafter, import_block, Block())}
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 16, "use_sliding_window": True}
LINEAR, THETA, DEFAULT = {"rope_type": "linear", "factor": 2.0}, {"rope_theta": 10000.0}, {"rope_type": "default"}
TWO_SETS = {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 16}
TWO_SETS |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LAYERS, OTHERS = ["sliding_attention", "full_attention"], ("layer_types", "use_sliding_window", "max_window_layers")


def saved(kind: str, path: Path, tokens: torch.Tensor | None = None) -> None:
    target = tiny_llama(0, VOCAB, layers=4)
    options = {} if kind == "eagle" else {"mask_token": 2, "block_size": 3, "markov_rank": 2}
    KINDS[kind][0].of_target(target, token_map=tokens, **options).save_pretrained(path)


def rewritten(path: Path, **fields: object) -> None:
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | fields))


def said_at_each_door(kind: str, path: Path) -> set[str | None]:
    """Return what loading, importing and `doctor` say; None where they take the files."""
    heads, read, described = KINDS[kind]
    said: set[str | None] = set()
    for load in (
        heads.from_pretrained,
        read,
        lambda path: described.inspect(DrafterSpec(kind, str(path)), None, False),
    ):
        try:
            load(path)
            said.add(None)
        except InputError as error:
            assert "\n" not in str(error)
            said.add(str(error))
    return said


CONTRADICTIONS = {
    "types": ({"rope_scaling": LINEAR}, "rope_type"),
    "thetas": ({"rope_theta": 5e5}, "rope_theta"),
    "an older field's theta": ({"rope_scaling": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta"),
    "factors": ({"rope_parameters": LINEAR | THETA, "rope_scaling": LINEAR | {"factor": 4.0}}, "factor"),
    "two names of the type": ({"rope_parameters": LINEAR | THETA | {"type": "dynamic"}}, "rope_type"),
    "a misspelt key": ({"rope_parameters": THETA | {"rope_type": "linear", "factr": 2.0}}, "factr"),
    "a theta that is misspelt": ({"rope_parameters": {"rope_type": "default", "rope_thetta": 5e5}}, "rope_thetta"),
    "no fields": ({"rope_scaling": 2}, "rope_scaling"),
    "angles of the longest text": ({"rope_parameters": THETA | {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
    "two sets of angles": ({"rope_parameters": THETA | TWO_SETS}, "rope_type"),
    "angles by kinds of layers": ({"rope_parameters": dict.fromkeys(LAYERS, THETA | DEFAULT)}, "rope_parameters"),
    "a window of no size": (WINDOW | {"sliding_window": None}, "sliding_window"),
    "a window of a broken size": (WINDOW | {"sliding_window": 16.5}, "sliding_window"),
    "a window in one of the target's layers": (WINDOW | {"layer_types": LAYERS}, "layer_types"),
    "a layer of no kind": ({"layer_types": [None]}, "layer_types"),
    "a window of nothing": (WINDOW | {"sliding_window": 0}, "sliding_window"),
    "a window that is on and off": (WINDOW | {"use_sliding_window": False}, "use_sliding_window"),
    "chunks": ({"layer_types": ["chunked_attention"]}, "layer_types"),
    "Qwen's window": (WINDOW | {"layer_types": None, "max_window_layers": 0}, "sliding_window"),
    "Mistral's window": ({"sliding_window": 16} | dict.fromkeys(OTHERS), "sliding_window"),
}
AGREEMENTS = {
    "the same twice": {"rope_parameters": LINEAR | THETA, "rope_scaling": LINEAR | {"factor": 2}, **THETA},
    "an older name": {"rope_parameters": {"rope_type": "default", "type": "mrope", **THETA}, "rope_scaling": None},
    "a family's own key": {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], **THETA}},
    "a window that is off": {"use_sliding_window": False, "sliding_window": 16},
    "a window behind all layers": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 28},
    "a layer's window": WINDOW,
    "a window of all positions": WINDOW | {"sliding_window": POSITIONS},
    "as many layers as the target": {"layer_types": ["full_attention"] * 4},
    "no layers": {"layer_types": []},
    "a window of no layer": WINDOW | {"layer_types": ["full_attention"], "max_window_layers": 0},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_config_that_contradicts_itself_is_refused_at_every_door(tmp_path, kind, name):
    saved(kind, tmp_path)
    fields, field = CONTRADICTIONS[name]
    rewritten(tmp_path, **fields)
    said = said_at_each_door(kind, tmp_path)
    assert None not in said and all(field in str(line) for line in said), said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", AGREEMENTS)
def test_a_config_that_says_the_same_twice_is_taken_at_every_door(tmp_path, kind, name):
    saved(kind, tmp_path)
    rewritten(tmp_path, **AGREEMENTS[name])
    assert said_at_each_door(kind, tmp_path) == {None}
    window = {"a layer's window": 16, "a window of all positions": POSITIONS}.get(name)
    assert KINDS[kind][1](tmp_path).config.window_of(0) == window
    said = KINDS[kind][2].inspect(DrafterSpec(kind, str(tmp_path)), None, False).text
    assert ("a window of" in said) == (f"a window of {window} positions" in said) == (window is not None)


def test_models_whose_config_contradicts_itself_are_refused(tmp_path):
    tiny_llama(0, VOCAB).save_pretrained(tmp_path)
    rewritten(tmp_path, rope_scaling=LINEAR)
    with pytest.raises(
        InputError, match=r"^draft: .*: rope_type: expected the same wherever .* linear in rope_scaling"
    ):
        empty_model(tmp_path, field="draft")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ids", [torch.arange(40), torch.cat([torch.arange(30), torch.arange(31, 51, 2)])])
def test_ids_in_place_of_distances_are_refused_at_every_door(tmp_path, kind, ids):
    saved(kind, tmp_path, TOKENS)
    tensors = load_file(tmp_path / "model.safetensors") | {"d2t": ids}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    said = said_at_each_door(kind, tmp_path)
    assert None not in said and all("d2t" in str(line) for line in said), said
    tensors.pop("t2d", None)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="d2t: expected each id's distance to its place"):
        KINDS[kind][1](tmp_path)
