"""What `init:` may say, which layers a number means, and which tokenizers a draft may have."""

import copy
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.distill.config import DraftInit
from draftsmith.distill.draft_init import layer_indices
from draftsmith.train.cli import parse_config
from draftsmith.train.models import check_same_tokenizer
from draftsmith.train.options import LoraOptions


@dataclass
class Nested:
    """A config with a draft's beginning in it."""

    draft: str | None = None
    init: DraftInit = field(default_factory=DraftInit)


def test_init_is_read_from_yaml_and_flags(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "init:\n  layers: [0, 3]\n  share: embeddings\n  lora: {r: 8, target_modules: [q_proj]}\n"
    )
    init = parse_config(Nested, ["--config", str(tmp_path / "c.yaml"), "--init.seed", "5"]).init
    assert init == DraftInit([0, 3], share="embeddings", seed=5, lora=LoraOptions(8, target_modules=["q_proj"]))
    assert parse_config(Nested, ["--init.layers", "4", "--init.hidden-size", "64"]).init == DraftInit(4, 64)
    overrides = {"num_hidden_layers": 2, "hidden_act": "relu"}
    assert parse_config(Nested, ["--init.config", str(overrides)]).init.config == overrides
    assert parse_config(Nested, []).init == DraftInit()
    with pytest.raises(InputError, match="layer"):
        parse_config(Nested, ["--init.layer", "4"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 2, "config": {}}, "init: expected one of layers and config, found both"),
        ({"hidden_size": 8}, "init.layers: expected the layers to carve with init.hidden_size, found none"),
        ({"layers": 2, "intermediate_size": 0}, "init.intermediate_size: expected at least 1, found 0"),
        ({"layers": 2, "share": "head"}, "init.share: expected one of none, embeddings, found 'head'"),
        ({"share": "embeddings"}, "init.share: expected init.layers or init.config with it, found neither"),
        (
            {"layers": 2, "share": "embeddings", "hidden_size": 8},
            "init.share: expected none for embeddings that init.hidden_size narrows, found embeddings",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(options, message):
    with pytest.raises(InputError) as error:
        DraftInit(**options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, "lora.r: expected at least 1, found 0"),
        ({"alpha": 0}, "lora.alpha: expected more than 0, found 0"),
        ({"dropout": 1.0}, "lora.dropout: expected at least 0 and less than 1, found 1.0"),
        ({"target_modules": []}, "lora.target_modules: expected at least one name, found none"),
    ],
)
def test_adapters_are_checked(options, message):
    with pytest.raises(InputError) as error:
        LoraOptions(**options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("draft", "init", "found"),
    [(None, {}, "none"), ("d", {"layers": 1}, "more than one"), ("d", {"config": {}}, "more than one")],
)
def test_a_draft_has_one_beginning(draft, init, found):
    with pytest.raises(InputError, match=rf"^draft: expected one of .* init.config, found {found}$"):
        DraftInit(**init).check_source(draft)
    for given, good in (("d", {}), (None, {"layers": 1}), (None, {"config": {}})):
        DraftInit(**good).check_source(given)


def test_a_number_of_layers_is_evenly_spaced():
    assert layer_indices(1, 12) == [0]
    assert layer_indices(2, 12) == [0, 11]
    assert layer_indices(4, 12) == [0, 4, 7, 11]
    for depth in range(1, 40):
        for count in range(2, depth + 1):
            kept = layer_indices(count, depth)
            gaps = [b - a for a, b in pairwise(kept)]
            assert kept[0] == 0 and kept[-1] == depth - 1 and len(kept) == count
            assert min(gaps) >= 1 and max(gaps) - min(gaps) <= 1
    assert layer_indices([1, 5], 12) == [1, 5]


@pytest.mark.parametrize("layers", [0, 13, [], [3, 1], [1, 1], [-1, 2], [0, 12]])
def test_layers_that_are_none_are_refused(layers):
    with pytest.raises(InputError, match=r"^init.layers: expected .* found "):
        layer_indices(layers, 12)


def test_tokenizers_may_differ_at_their_ends_alone(tokenizer):
    longer, renamed = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    longer.add_tokens(["<extra>", "<more>"])
    for one, other in ((tokenizer, tokenizer), (tokenizer, longer), (longer, tokenizer)):
        check_same_tokenizer(one, other, "t", "d", ends_may_differ=True)
    renamed.add_tokens(["<other>", "<more>"])
    end = len(tokenizer)
    with pytest.raises(InputError) as error:
        check_same_tokenizer(longer, renamed, "t", "d", ends_may_differ=True)
    assert str(error.value) == (
        f"draft d: expected the tokenizer of target t, found 1 tokens that differ, the first {end}: '<other>' in the "
        "draft, '<extra>' in the target; carve a draft from the target (init.layers), or decode with "
        "RetokenizedProposer"
    )
