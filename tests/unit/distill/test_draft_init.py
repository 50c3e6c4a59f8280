"""What `init:` may say, which layers a number means, and which tokenizers a draft may have."""

import copy
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.distill.carving import describe, ways_to_keep
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
    overrides = {"num_hidden_layers": 2, "hidden_act": "relu"}
    assert parse_config(Nested, ["--init.config", str(overrides)]).init.config == overrides
    assert parse_config(Nested, []).init == DraftInit()
    with pytest.raises(InputError, match="layer"):
        parse_config(Nested, ["--init.layer", "4"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 2, "config": {}}, "init: expected one of layers and config, found both"),
        ({"layers": 2, "share": "head"}, "init.share: expected one of none, embeddings, found 'head'"),
        ({"share": "embeddings"}, "init.share: expected init.layers or init.config with it, found neither"),
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


TWELVE = ["full_attention"] * 12


def test_a_number_of_layers_is_evenly_spaced():
    assert layer_indices(1, TWELVE) == [0]
    assert layer_indices(2, TWELVE) == [0, 11]
    assert layer_indices(4, TWELVE) == [0, 4, 7, 11]
    for depth in range(1, 40):
        for count in range(2, depth + 1):
            kept = layer_indices(count, ["full_attention"] * depth)
            gaps = [b - a for a, b in pairwise(kept)]
            assert kept[0] == 0 and kept[-1] == depth - 1 and len(kept) == count
            assert min(gaps) >= 1 and max(gaps) - min(gaps) <= 1
    assert layer_indices([1, 5], TWELVE) == [1, 5]


# Layers of states (s), of attention (a), and of neither (m).
KINDS = {"s": "linear_attention", "c": "conv", "a": "full_attention", "m": "dummy"}
QWEN, LFM2, NEMOTRON = "sssa" * 8, "ccaccaccacacacac", "smsmsmsasmsmsmsmsasmsmsmsmsasm"


@pytest.mark.parametrize(
    ("target", "count", "kept", "pattern"),
    [
        (QWEN, 1, [31], "a"),
        (QWEN, 2, [0, 31], "sa"),
        (QWEN, 4, [0, 10, 21, 31], "sssa"),
        (QWEN, 8, [0, 4, 9, 15, 18, 22, 26, 31], "sssasssa"),
        (QWEN, 32, list(range(32)), QWEN),
        (LFM2, 2, [0, 14], "ca"),
        (LFM2, 3, [0, 7, 14], "cca"),
        (LFM2, 16, list(range(16)), LFM2),
        (NEMOTRON, 2, [0, 27], "sa"),
        (NEMOTRON, 3, [1, 14, 27], "msa"),
        ("smama" * 2, 2, [0, 9], "sa"),
        ("smmama", 2, [0, 5], "sa"),
        ("sac", 3, [0, 1, 2], "sac"),
        ("aassss", 4, [0, 1, 3, 5], "aass"),
        ("ssss", 2, [0, 3], "ss"),
    ],
)
def test_layers_alternate_as_the_targets_do(target, count, kept, pattern):
    kinds = [KINDS[letter] for letter in target]
    assert layer_indices(count, kinds) == kept
    assert "".join(target[index] for index in kept) == pattern
    for layers in ways_to_keep(kept, kinds):
        assert "a" not in target or any(target[index] == "a" for index in layers)


def test_kept_layers_are_counted_by_kind():
    assert describe([0, 1, 5, 7], [KINDS[letter] for letter in "smsmsmsa"]) == (
        "1 linear_attention (0), 2 other (1, 5), 1 full_attention (7)"
    )


def test_layers_of_states_alone_are_refused():
    kinds = [KINDS[letter] for letter in "sssa" * 2]
    with pytest.raises(InputError) as error:
        layer_indices([0, 2], kinds)
    assert str(error.value) == "init.layers: expected some of the layers with attention, 3, 7, found 0, 2, without any"


@pytest.mark.parametrize("layers", [0, 13, [], [3, 1], [1, 1], [-1, 2], [0, 12]])
def test_layers_that_are_none_are_refused(layers):
    with pytest.raises(InputError, match=r"^init.layers: expected .* found "):
        layer_indices(layers, TWELVE)


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
        "draft, '<extra>' in the target; carve a draft from the target (init.layers)"
    )
