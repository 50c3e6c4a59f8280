"""Cached features: what is on disk is what the target's layers gave, whatever was stopped, cut, packed or damaged."""

import io
import json
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import tiny_llama
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel

from draftsmith.decode.errors import InputError
from draftsmith.train.data.collator import CompletionCollator
from draftsmith.train.data.examples import training_examples
from draftsmith.train.data.generate import load_completions
from draftsmith.train.data.packing import pack
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.recipe import RecipeConfig
from draftsmith.train.runs import save_model
from draftsmith.train.teacher import cache_writer, feature_shards
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache
from draftsmith.train.teacher.feature_reader import FeatureCollator, cached_states, find_features
from draftsmith.train.teacher.target_ends import ENDS, load_ends, save_ends

PATHS = ("short", "long")


def configured(pipeline: Path, output: Path, **options) -> CacheConfig:
    options = {"completions": [str(pipeline / name) for name in PATHS], "batch_size": 3} | options
    options = {"features": True, "layer_ids": [1, 2], "feature_dtype": "float32", "dtype": "float32"} | options
    return CacheConfig(str(pipeline / "target"), output=str(output), **options)


def found_in(pipeline: Path, *caches: Path, vocab_size: int = 300, **options):
    options = {"completions": [str(pipeline / name) for name in PATHS]} | options
    config = RecipeConfig(**{"target": str(pipeline / "target")} | options)
    return find_features([str(cache) for cache in caches], config, vocab_size)


@pytest.fixture(scope="module")
def whole(pipeline, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "cache"
    with redirect_stdout(io.StringIO()) as said:
        summary = make_cache(configured(pipeline, output))
    return summary, output, said.getvalue().splitlines()


@pytest.fixture(scope="module")
def collate(pipeline, whole, tokenizer) -> FeatureCollator:
    return FeatureCollator(CompletionCollator(tokenizer), found_in(pipeline, whole[1]))


def by_hand(pipeline: Path, ids: list[int]) -> dict[str, torch.Tensor]:
    """A text's states, from the library's own forward of it alone; but for its last token."""
    model = AutoModelForCausalLM.from_pretrained(pipeline / "target", dtype=torch.float32)
    with torch.no_grad():
        layers, last = [], model.model.layers[-1].register_forward_hook(lambda _m, _i, out: layers.append(out))
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        last.remove()
    return {"features": torch.cat([hidden[1], layers[0]], dim=-1)[0, :-1], "hidden": hidden[-1][0, :-1]}


def examples_of(pipeline: Path, max_length: int | None = None):
    return training_examples([str(pipeline / name) for name in PATHS], max_length)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_read(pipeline, tmp_path, tokenizer, dtype):
    make_cache(configured(pipeline, tmp_path / "cache", feature_dtype=dtype))
    collate = FeatureCollator(CompletionCollator(tokenizer), found_in(pipeline, tmp_path / "cache"))
    examples = examples_of(pipeline)
    samples = [examples[i] for i in (3, 11, 0, 17)]
    batch = collate(samples)
    assert next(iter(batch)) == "input_ids" and next(reversed(batch)) == "teacher"
    assert not any(column.is_floating_point() for column in batch["teacher"].values())
    found = cached_states(batch["teacher"])
    rows, columns = batch["input_ids"].shape
    assert found["features"].shape == (rows, columns, 64) and found["hidden"].shape == (rows, columns, 32)
    for row, sample in enumerate(samples):
        for name, expected in by_hand(pipeline, sample["input_ids"]).items():
            states = found[name][row]
            assert states.dtype == getattr(torch, dtype)
            rounding = {"rtol": 0, "atol": 1e-5} if dtype == "float32" else {"rtol": 2**-8, "atol": 1e-5}
            torch.testing.assert_close(states[: len(expected)].float(), expected, **rounding)
            assert not states[len(expected) :].any()


def test_cut_texts_have_the_first_of_their_states(pipeline, collate):
    long = examples_of(pipeline)
    most = max(long.lengths) - 4
    at = int(long.lengths.argmax())
    a, b = (cached_states(collate([data[at]])["teacher"]) for data in (long, examples_of(pipeline, most)))
    for name in a:
        assert b[name].shape[1] == most
        assert torch.equal(a[name][:, :most], b[name])


def test_packed_rows_have_their_samples_states_in_place(pipeline, collate):
    data = examples_of(pipeline)
    rows = list(pack(data, 64))
    assert len(rows) < len(data)
    packed = cached_states(collate(rows)["teacher"])
    by_text = {sample["texts"][0]: sample for sample in data}
    for number, row in enumerate(rows):
        start = 0
        for text in row["texts"]:
            alone = cached_states(collate([by_text[text]])["teacher"])
            end = start + len(by_text[text]["input_ids"])
            for name in alone:
                assert torch.equal(packed[name][number, start:end], alone[name][0])
            start = end


def test_the_estimate_comes_first_and_is_not_exceeded(pipeline, whole):
    summary, output, said = whole
    tokens = sum(len(ids) - 1 for name in PATHS for ids in load_completions(str(pipeline / name))["input_ids"])
    assert (summary.samples, summary.written, summary.kept) == (20, 20, 0)
    assert summary.positions == summary.positions_written == tokens
    assert summary.size == sum(file.stat().st_size for file in output.glob("*.parquet"))
    (line,) = said
    assert f"{tokens} positions × 384 bytes of layers 1, 2 and the last, in float32: at most " in line
    assert " MB free; about 0:00:" in line
    assert tokens * 384 < summary.size < tokens * 384 + 20 * feature_shards.FeatureShards.sample_bytes


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


class Killed(Exception):
    pass


def test_a_killed_run_goes_on_where_it_stopped(pipeline, whole, tmp_path, monkeypatch):
    output, real = tmp_path / "cache", feature_shards.FeatureShards.write

    def killed(self, path, *args):
        if path.name.startswith("001"):
            (output / ".001-shard-00000.parquet.partial").write_bytes(b"half")
            raise Killed
        real(self, path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(feature_shards.FeatureShards, "write", killed)
        with pytest.raises(Killed):
            make_cache(configured(pipeline, output))
    assert len(list(output.glob("*.parquet"))) == 1
    summary = make_cache(configured(pipeline, output))
    assert (summary.kept, summary.written, summary.samples) == (10, 10, 20)
    assert contents(output) == contents(whole[1])
    (output / ENDS).unlink()
    cut = output / "000-shard-00000.parquet"
    cut.write_bytes(cut.read_bytes()[:-9])
    assert make_cache(configured(pipeline, output)).written == 10
    assert contents(output) == contents(whole[1])
    monkeypatch.setattr(cache_writer, "load_model", None)  # nothing is missing: no model is loaded
    assert make_cache(configured(pipeline, output)).kept == 20


def test_damage_among_the_numbers_is_found_when_they_are_read(pipeline, whole, tmp_path, tokenizer):
    output = tmp_path / "cache"
    shutil.copytree(whole[1], output)
    file = output / "000-shard-00000.parquet"
    column = pq.read_metadata(file).row_group(0).column(2)
    assert column.path_in_schema == "features.list.element"
    data = bytearray(file.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    file.write_bytes(bytes(data))
    collate = FeatureCollator(CompletionCollator(tokenizer), found_in(pipeline, output))
    with pytest.raises(InputError, match=r"000-shard-00000\.parquet: expected a shard of a teacher cache, found a dam"):
        for example in examples_of(pipeline):
            collate([example])


def test_less_space_than_the_estimate_is_refused(pipeline, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_writer.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match=r"^output: expected 0\.\d MB of free space for .*, found 0\.0 MB; free"):
        make_cache(configured(pipeline, tmp_path / "cache"))
    assert not list((tmp_path / "cache").glob("*.parquet"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_ids": [1]}, r"^layer_ids: expected \[1, 2\], found \[1\]; .* begun with other settings"),
        ({"feature_dtype": "bfloat16"}, "^feature_dtype: expected 'float32', found 'bfloat16'"),
        ({"layer_ids": [1, 7]}, "^layer_ids: expected ascending depths between 1 and the target's 2 layers"),
        (
            {"features": False, "layer_ids": []},
            r"manifest\.json: expected schema 'draftsmith\.teacher/1', found 'draftsmith\.features/1'",
        ),
    ],
)
def test_a_cache_is_not_resumed_otherwise(pipeline, whole, options, message):
    with pytest.raises(InputError, match=message):
        make_cache(configured(pipeline, whole[1], **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 64}, "k: expected none with features, which hold no distributions, found 64"),
        ({"temperature": 0.7}, r"temperature: expected none with features, .* found 0\.7"),
        ({"feature_dtype": "int8"}, "feature_dtype: expected one of bfloat16, float32, found 'int8'"),
        ({"layer_ids": [0]}, "layer_ids: expected at least 1, found 0"),
        ({"layer_ids": [1], "features": False}, "layer_ids: expected none without features"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(InputError, match=f"^{message}"):
        CacheConfig("target", **{"completions": ["c"], "features": True} | options, output="o")


def test_a_family_without_such_layers_is_refused(pipeline, tmp_path, tokenizer):
    """Before its weights are read."""
    torch.manual_seed(0)
    other = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=4, n_head=2))
    save_model(other, tokenizer, tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").unlink()
    config = configured(pipeline, tmp_path / "cache", layer_ids=[])
    with pytest.raises(InputError, match=r"^target: expected a model whose decoder has its layers in `layers`, .*GPT2"):
        make_cache(replace(config, target=str(tmp_path / "target")))


def test_some_of_the_depths_are_looked_up_alone(pipeline, whole):
    """Heads of several kinds learn from one cache."""
    index = found_in(pipeline, whole[1])
    both, second = index.of_layers([1, 2]), index.of_layers([2])
    assert second.widths == {"features": 32, "hidden": 32} and both.widths["features"] == 64
    values = np.arange(3 * 64).reshape(3, 64)
    assert (second.picked(values) == values[:, 32:]).all() and both.picked(values) is values


def test_caches_of_something_else_are_refused(pipeline, whole, tmp_path, tokenizer):
    save_model(tiny_llama(5, len(tokenizer)), tokenizer, tmp_path / "other")
    with pytest.raises(InputError, match=r"^teacher_cache: expected a cache of .*other, found in .*safetensors is a"):
        found_in(pipeline, whole[1], target=str(tmp_path / "other"))
    with pytest.raises(InputError, match=r"^teacher_cache: expected a cache of the completions .*heldout as they are"):
        found_in(pipeline, whole[1], completions=[str(pipeline / "heldout")])
    with pytest.raises(InputError, match=f"expected a cache written by draftsmith cache, found none at {tmp_path}"):
        found_in(pipeline, tmp_path)
    with pytest.raises(InputError, match=r"^layer_ids: expected some of \[1, 2\], after which .*, found \[2, 3\]; run"):
        found_in(pipeline, whole[1]).of_layers([2, 3])
    make_cache(configured(pipeline, tmp_path / "coarse", feature_dtype="bfloat16"))
    message = r"^teacher_cache: expected caches of one layout, found layers \[1, 2\] in float32 in .*in bfloat16 in"
    with pytest.raises(InputError, match=message):
        found_in(pipeline, whole[1], tmp_path / "coarse")
    manifest = whole[1] / "manifest.json"
    assert json.loads(manifest.read_text())["settings"]["layer_ids"] == [1, 2]
    make_cache(configured(pipeline, tmp_path / "laws", features=False, layer_ids=[], feature_dtype="bfloat16"))
    with pytest.raises(InputError, match=r"expected schema 'draftsmith\.features/1', found 'draftsmith\.teacher/1'"):
        found_in(pipeline, tmp_path / "laws")


# What stays of the target


def gemma(vocab: int) -> Gemma3ForCausalLM:
    """Embeddings that a buffer scales, and that the head is tied to."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    return Gemma3ForCausalLM(Gemma3TextConfig(vocab_size=vocab, num_hidden_layers=3, head_dim=16, **shape)).eval()


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_the_ends_of_a_target_are_its_own(tmp_path, tokenizer, kind):
    target = gemma(300) if kind == "gemma" else tiny_llama(0, 300, layers=3)
    save_model(target, tokenizer, tmp_path / "target")
    save_ends(target, tmp_path / ENDS)
    (tmp_path / "target" / "model.safetensors").unlink()
    found = load_ends(tmp_path / ENDS, str(tmp_path / "target"))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(found.get_input_embeddings()(ids), target.get_input_embeddings()(ids))
    assert torch.equal(head_of(found).weight, head_of(target).weight)
    assert torch.equal(found.get_decoder().norm.weight, target.get_decoder().norm.weight)
    layers = found.get_decoder().layers
    assert [next(layer.parameters()).is_meta for layer in layers] == [True, True, False]
    for name, weight in layers[-1].state_dict().items():
        assert torch.equal(weight, target.get_decoder().layers[-1].state_dict()[name])
    assert not any(parameter.requires_grad for parameter in found.parameters())
    assert (head_of(found).weight is found.get_input_embeddings().weight) == (kind == "gemma")


@pytest.mark.parametrize("fault", ["missing", "cut", "another", "flipped"])
def test_ends_that_are_none_are_one_line(tmp_path, tokenizer, fault):
    save_model(tiny_llama(0, 300), tokenizer, tmp_path / "target")
    save_ends(tiny_llama(0, 300, hidden=16 if fault == "another" else 32), tmp_path / ENDS)
    if fault == "missing":
        (tmp_path / ENDS).unlink()
    elif fault == "cut":
        (tmp_path / ENDS).write_bytes((tmp_path / ENDS).read_bytes()[:-100])
    elif fault == "flipped":
        content = bytearray((tmp_path / ENDS).read_bytes())
        content[-101] ^= 1
        (tmp_path / ENDS).write_bytes(content)
    with pytest.raises(InputError, match=r"^teacher_cache: expected what draftsmith cache --features keeps") as error:
        load_ends(tmp_path / ENDS, str(tmp_path / "target"))
    assert "\n" not in str(error.value)
