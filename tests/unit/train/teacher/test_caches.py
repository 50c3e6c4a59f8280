"""Caches on disk: what is there is what the target gave, whatever was stopped, cut, packed or damaged."""

import io
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import tiny_llama
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from draftsmith.decode.errors import InputError
from draftsmith.decode.sampling import Sampler
from draftsmith.scripts import cache as command
from draftsmith.train.cli import run
from draftsmith.train.data.examples import CompletionCollator, training_examples
from draftsmith.train.data.generate import PrepareConfig, load_completions, prepare
from draftsmith.train.data.packing import pack
from draftsmith.train.data.shards import COLUMNS, read_shard, write_shard
from draftsmith.train.losses.distributions import CachedDistributions
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.recipe import RecipeConfig
from draftsmith.train.runs import save_model
from draftsmith.train.teacher import cache_writer
from draftsmith.train.teacher.cache_reader import CachedCollator, cached_distributions, find_distributions
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache
from draftsmith.train.teacher.distribution_shards import DistributionShards
from draftsmith.train.teacher.feature_reader import cached_states, find_features
from draftsmith.train.teacher.feature_shards import FeatureShards
from draftsmith.train.teacher.state_cache import StateCache

PATHS = ("short", "long")


def laws_of(columns, rows) -> dict[str, torch.Tensor]:
    return vars(cached_distributions(columns))


def states_of(columns, rows) -> dict[str, torch.Tensor]:
    """The states of the rows' tokens, without padding, in order."""
    return {
        name: torch.cat([states[at, : len(row["input_ids"])] for at, row in enumerate(rows)])
        for name, states in cached_states(columns).items()
    }


def find_all_features(*given):
    return find_features(*given).of_layers([1, 2])


@dataclass(frozen=True)
class Kind:
    """A kind of cache: its settings here, how it is read, and what is said of it."""

    options: dict
    find: Callable
    read: Callable
    shards: type
    numbers: str  # the column that is damaged
    size: tuple[int, str]  # of a position
    schema: str


KINDS = {
    "laws": Kind(
        {"k": 8}, find_distributions, laws_of, DistributionShards, "log_p", (56, "at k=8"), "draftsmith.teacher/2"
    ),
    "features": Kind(
        {"features": True, "layer_ids": [1, 2], "feature_dtype": "float32", "dtype": "float32"},
        find_all_features, states_of, FeatureShards, "features", (384, "of layers 1, 2 and the last, in float32"),
        "draftsmith.features/2",
    ),
}  # fmt: skip
FEATURES = KINDS["features"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory, tokenizer):
    """A target whose head is padded beyond its tokenizer, and two directories of completions with the same ids."""
    root = tmp_path_factory.mktemp("pipeline")
    target = tiny_llama(0, len(tokenizer) + 13)
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    save_model(target, tokenizer, root / "target")
    for name, count, tokens in (("short", 5, 3), ("long", 7, 12)):
        (root / f"{name}.txt").write_text("\n".join(f"x{i} = {'y + ' * (i % 4)}1" for i in range(count)))
        flags = {"max_new_tokens": tokens, "batch_size": 3, "shard_size": 3, "seed": count}
        prepare(PrepareConfig(str(root / "target"), str(root / f"{name}.txt"), str(root / name), **flags))
    return root


def configured(pipeline: Path, kind: Kind, output: Path, **options) -> CacheConfig:
    options = {"completions": [str(pipeline / name) for name in PATHS], "batch_size": 2} | kind.options | options
    return CacheConfig(str(pipeline / "target"), output=str(output), **options)


def found_in(pipeline: Path, kind: Kind, *caches: Path, vocab_size: int = 300, **options):
    options = {"completions": [str(pipeline / name) for name in PATHS]} | options
    config = RecipeConfig(**{"target": str(pipeline / "target")} | options)
    return kind.find([str(cache) for cache in caches], config, vocab_size)


def examples_of(pipeline: Path, max_length: int | None = None):
    return training_examples([str(pipeline / name) for name in PATHS], max_length)


@pytest.fixture(scope="module")
def whole(pipeline, kind, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "cache"
    with redirect_stdout(io.StringIO()) as said:
        summary = make_cache(configured(pipeline, kind, output))
    return summary, output, said.getvalue().splitlines()


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole[1], tmp_path / "cache"))


@pytest.fixture
def read(pipeline, kind, tokenizer) -> Callable:
    """Reads rows from a cache as they are in training."""

    def read(cache: Path, rows: list[dict], **options) -> dict[str, torch.Tensor]:
        collate = CachedCollator(CompletionCollator(tokenizer), found_in(pipeline, kind, cache, **options))
        batch = collate(rows)
        assert next(iter(batch)) == "input_ids" and next(reversed(batch)) == "teacher"
        assert not any(column.is_floating_point() for column in batch["teacher"].values())
        return kind.read(batch["teacher"], rows)

    return read


def damage(file: Path, kind: Kind) -> None:
    """Flip a bit among the numbers; names, checksums and the footer stay whole."""
    row_group = pq.read_metadata(file).row_group(0)
    columns = [row_group.column(at) for at in range(row_group.num_columns)]
    (column,) = [column for column in columns if column.path_in_schema == f"{kind.numbers}.list.element"]
    data = bytearray(file.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    file.write_bytes(bytes(data))


def shard_of(cache: Path, completions: str, number: int) -> Path:
    (file,) = cache.glob(f"{completions}-shard-{number:05d}-*.parquet")
    return file


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def test_cut_texts_have_the_first_of_their_numbers(pipeline, whole, read):
    long = examples_of(pipeline)
    most, at = max(long.lengths) - 4, int(long.lengths.argmax())
    a = read(whole[1], [long[at]])
    b = read(whole[1], [examples_of(pipeline, most)[at]], max_length=most)
    for name in a:
        assert len(b[name]) == len(a[name]) - 4 > 0
        assert torch.equal(a[name][:-4], b[name])


def test_packed_rows_have_their_samples_numbers_in_order(pipeline, whole, read):
    data = examples_of(pipeline)
    rows = list(pack(data, 64))
    assert len(rows) < len(data)
    by_text = {sample["texts"][0]: sample for sample in data}
    alone = [read(whole[1], [by_text[text]]) for row in rows for text in row["texts"]]
    for name, column in read(whole[1], rows).items():
        assert torch.equal(column, torch.cat([part[name] for part in alone]))


def test_the_estimate_comes_first_and_is_not_exceeded(pipeline, kind, whole):
    summary, output, said = whole
    masks = [mask for name in PATHS for mask in load_completions(str(pipeline / name))["loss_mask"]]
    positions = sum(len(mask) - 1 if kind is FEATURES else sum(mask) for mask in masks)
    assert (summary.samples, summary.written, summary.kept) == (12, 12, 0)
    assert summary.positions == summary.positions_written == positions
    assert summary.size == sum(file.stat().st_size for file in output.glob("*.parquet"))
    assert summary.bytes_per_token == summary.size / positions
    (line,) = said
    assert f"{positions} positions × {kind.size[0]} bytes {kind.size[1]}: at most " in line
    assert line.endswith(" MB free")
    most = positions * kind.size[0]
    if kind is FEATURES:  # which are not compressed
        assert most < summary.size < most + 12 * FeatureShards.sample_bytes


class Killed(Exception):
    pass


def test_a_killed_run_goes_on_where_it_stopped(pipeline, kind, whole, tmp_path, monkeypatch, capsys):
    output, real = tmp_path / "cache", kind.shards.write

    def killed(self, path, *args):
        if path.name.startswith("long"):
            (output / f".{path.name}.partial").write_bytes(b"half")
            raise Killed
        real(self, path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(kind.shards, "write", killed)
        with pytest.raises(Killed):
            make_cache(configured(pipeline, kind, output))
    assert len(list(output.glob("*.parquet"))) == 2
    capsys.readouterr()
    summary = make_cache(configured(pipeline, kind, output))
    assert (summary.kept, summary.written, summary.samples) == (5, 7, 12)
    assert contents(output) == contents(whole[1])
    monkeypatch.setattr(cache_writer, "load_model", None)  # nothing is missing: no model is loaded
    again = make_cache(configured(pipeline, kind, output))
    assert (again.kept, again.written, again.bytes_per_token) == (12, 0, whole[0].bytes_per_token)
    assert capsys.readouterr().out.count("\n") == 1


def test_a_damaged_shard_is_written_again(pipeline, kind, whole, copied):
    file = shard_of(copied, "long", 1)
    if kind is FEATURES:  # whose numbers are not read: see `FeatureShards`
        file.write_bytes(file.read_bytes()[:-9])
    else:
        damage(file, kind)
    summary = make_cache(configured(pipeline, kind, copied))
    assert (summary.kept, summary.written) == (9, 3)
    assert contents(copied) == contents(whole[1])


def test_damage_among_the_numbers_is_found_when_they_are_read(pipeline, kind, copied, read):
    damage(shard_of(copied, "short", 0), kind)
    with pytest.raises(InputError, match=r"short-shard-00000-\w+\.parquet: expected .*, found a damaged file"):
        for example in examples_of(pipeline):
            read(copied, [example])


def test_less_space_than_the_estimate_is_refused(pipeline, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_writer.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match=r"^output: expected 0\.\d MB of free space for .*, found 0\.0 MB; free"):
        make_cache(configured(pipeline, kind, tmp_path / "cache"))
    assert not list((tmp_path / "cache").glob("*.parquet"))


OTHERWISE = {
    "laws": [
        ({"k": 9}, "^k: expected 8, found 9; .* begun with other settings"),
        ({"temperature": 0.5}, r"^temperature: expected 1\.0, found 0\.5"),
        ({"k": 301}, "^k: expected at most the target's 300 tokens, found 301"),
    ],
    "features": [
        ({"layer_ids": [1]}, r"^layer_ids: expected \[1, 2\], found \[1\]; .* begun with other settings"),
        ({"feature_dtype": "bfloat16"}, "^feature_dtype: expected 'float32', found 'bfloat16'"),
        ({"layer_ids": [1, 7]}, "^layer_ids: expected ascending depths between 1 and the target's 2 layers"),
        ({"features": False, "layer_ids": None}, r"manifest\.json: expected schema 'draftsmith\.teacher/2', found"),
    ],
}


def test_a_cache_is_not_resumed_otherwise(pipeline, kind, whole):
    for options, message in OTHERWISE["features" if kind is FEATURES else "laws"]:
        with pytest.raises(InputError, match=message):
            make_cache(configured(pipeline, kind, whole[1], **options))


def test_caches_of_another_target_are_refused(pipeline, kind, whole, tmp_path, tokenizer):
    save_model(tiny_llama(5, len(tokenizer) + 13), tokenizer, tmp_path / "other")
    with pytest.raises(InputError, match=r"^target: expected .* as it was \(model\.safetensors"):
        make_cache(replace(configured(pipeline, kind, whole[1]), target=str(tmp_path / "other")))
    with pytest.raises(InputError, match=r"^teacher_cache: expected a cache of .*other, found in .*safetensors is a"):
        found_in(pipeline, kind, whole[1], target=str(tmp_path / "other"))
    with pytest.raises(InputError, match=r"^teacher_cache: expected 299 tokens, found 300 in"):
        found_in(pipeline, kind, whole[1], vocab_size=299)


def test_what_is_missing_is_named(pipeline, kind, copied, tmp_path):
    with pytest.raises(InputError, match=f"expected a cache written by draftsmith cache, found none at {tmp_path}$"):
        found_in(pipeline, kind, tmp_path)
    shard_of(copied, "long", 1).unlink()
    lacking = load_completions(str(pipeline / "long"))["id"][3:6]
    named = ", ".join(f"{pipeline / 'long'}: {name}" for name in lacking)
    message = f"expected all 12 samples of the run in {copied}, found 3 missing: {named}; run draftsmith"
    with pytest.raises(InputError, match=message):
        found_in(pipeline, kind, copied)
    shard_of(copied, "long", 0).write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"long-shard-00000-\w+\.parquet: expected .*, found a damaged file"):
        found_in(pipeline, kind, copied)
    (copied / "manifest.json").write_text(json.dumps({"schema": "draftsmith.completions/1"}))
    with pytest.raises(InputError, match=f"expected schema '{kind.schema}', found 'draftsmith.completions/1'"):
        found_in(pipeline, kind, copied)


def test_other_completions_are_refused(pipeline, kind, whole, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("x = 1\n")
    prepare(PrepareConfig(str(pipeline / "target"), str(prompts), str(tmp_path / "other"), max_new_tokens=4))
    with pytest.raises(InputError, match=r"^teacher_cache: expected all 1 samples of the run in .*, found 1 missing: "):
        found_in(pipeline, kind, whole[1], completions=[str(tmp_path / "other")])


def test_caches_of_one_shape_cover_completions_together(pipeline, kind, tmp_path):
    other, message = ({"k": 9}, "one k, found 8 in .*short and 9 in .*other")
    if kind is FEATURES:
        other, message = {"feature_dtype": "bfloat16"}, "one layout, found .* in float32 in .*short, .* in bfloat16 in"
    for path, completions, options in (("short", "short", {}), ("long", "long", {}), ("other", "long", other)):
        paths = [str(pipeline / completions)]
        make_cache(configured(pipeline, kind, tmp_path / path, completions=paths, **options))
    assert len(found_in(pipeline, kind, tmp_path / "short", tmp_path / "long").places) == 12
    with pytest.raises(InputError, match=f"^teacher_cache: expected caches of {message}"):
        found_in(pipeline, kind, tmp_path / "short", tmp_path / "other")
    more = make_cache(configured(pipeline, kind, tmp_path / "short"))  # a cache takes other completions, too
    assert (more.kept, more.written) == (5, 7) and len(found_in(pipeline, kind, tmp_path / "short").places) == 12


SERVED = {"teacher": ["vllm:http://a"], "features": True}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"completions": []}, "completions"),
        ({"k": 0}, "k"),
        ({"temperature": 0.0}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
        ({"dtype": "int8"}, "dtype"),
        ({"features": True, "k": 64}, "k"),
        ({"features": True, "temperature": 0.7}, "temperature"),
        ({"feature_dtype": "int8"}, "feature_dtype"),
        ({"features": True, "layer_ids": [0]}, "layer_ids"),
        ({"layer_ids": []}, "layer_ids"),
        ({"teacher": ["vllm:http://a"]}, "teacher"),
        (SERVED | {"target_quantization": "8bit"}, "target_quantization"),
    ],
)
def test_bad_settings_are_named(options, field):
    with pytest.raises(InputError, match=f"^{field}: expected "):
        CacheConfig("target", **({"completions": ["c"]} | options), output="o")


# Of laws


of_laws, of_features = (pytest.mark.parametrize("kind", [kind], indirect=True) for kind in KINDS)


def laws_by_hand(pipeline: Path, sample: dict, sampler: Sampler, k: int) -> CachedDistributions:
    """A sample's laws, from the library's own forward of the sample alone."""
    model = AutoModelForCausalLM.from_pretrained(pipeline / "target", dtype=torch.float32)
    ids = torch.tensor([sample["input_ids"]])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1, :300]
    inside = torch.tensor([label != -100 for label in sample["labels"][1:]])
    return CachedDistributions.of(logits[inside].contiguous(), ids[0, 1:][inside], sampler, k)


@of_laws
@pytest.mark.parametrize("k", [8, 300])
def test_laws_that_are_written_are_read(pipeline, kind, tmp_path, read, k):
    sampler = {"temperature": 0.8, "top_p": 0.95}
    make_cache(configured(pipeline, kind, tmp_path / "cache", k=k, **sampler))
    examples = examples_of(pipeline)
    samples = [examples[i] for i in (3, 11, 0, 7)]
    found = CachedDistributions(**read(tmp_path / "cache", samples, **sampler))
    by_hand = [laws_by_hand(pipeline, sample, Sampler.of(**sampler), k) for sample in samples]
    expected = CachedDistributions.concatenated(by_hand)
    assert len(found) == len(expected) == sum(label != -100 for sample in samples for label in sample["labels"][1:])
    assert torch.equal(found.ids.long()[:, 0], expected.ids[:, 0])
    assert (found.log_p.dtype, found.log_tail.dtype) == (torch.float16, torch.float32)
    kept = expected.log_p.isfinite()
    assert torch.equal(found.log_p.isfinite(), kept)
    assert torch.equal(found.ids.long()[kept], expected.ids[kept])
    assert torch.allclose(found.log_p[kept].float(), expected.log_p[kept], rtol=2**-10, atol=1e-5)  # 11 bits
    # A forward of other shape rounds otherwise.
    assert torch.allclose(found.log_tail.exp(), expected.log_tail.exp(), atol=1e-5)
    assert torch.allclose(found.log_p_of_text, expected.log_p_of_text, atol=1e-4)
    assert torch.allclose(found.bucketed().exp().sum(-1), torch.ones(len(found)))


@of_laws
@pytest.mark.parametrize(("name", "value"), [("temperature", 0.7), ("top_k", 5), ("top_p", 0.9)])
def test_training_under_another_law_is_refused(pipeline, kind, whole, name, value):
    with pytest.raises(InputError, match=f"^{name}: expected .*, which .* was written at, found {value}"):
        found_in(pipeline, kind, whole[1], **{name: value})


def test_completions_that_no_target_wrote_are_refused(pipeline, tmp_path):
    shutil.copytree(pipeline / "short", tmp_path / "short")
    file = tmp_path / "short" / "shard-00000.parquet"
    shard = read_shard(file)
    ids = pa.array([[2**30] * len(row) for row in shard["input_ids"].to_pylist()], COLUMNS.field(3).type)
    for changed, message in (
        (shard.slice(0, 0), "expected samples, found none$"),
        (shard.set_column(3, COLUMNS.field(3), ids), "found token 1073741824 with a vocabulary"),
    ):
        write_shard(file, changed)
        with pytest.raises(InputError, match=rf"shard-00000\.parquet: .*{message}"):
            make_cache(configured(pipeline, KINDS["laws"], tmp_path / "c", completions=[str(tmp_path / "short")]))


def test_the_command_writes_a_cache(pipeline, tmp_path, capsys):
    argv = ["--target", str(pipeline / "target"), "--completions", f"[{pipeline / 'short'}]"]
    argv += ["--output", str(tmp_path / "c")]
    assert run(lambda: command.main([*argv, "--k", "4"])) == 0
    out = capsys.readouterr().out
    assert "positions × 32 bytes at k=4" in out and "bytes a token" in out and "5 written now, 0 kept" in out
    assert run(lambda: command.main([*argv, "--k", "5"])) == 2
    assert "error: k: expected 4, found 5" in capsys.readouterr().err


# Of features


def states_by_hand(pipeline: Path, ids: list[int]) -> dict[str, torch.Tensor]:
    """A text's states, from the library's own forward of it alone; but for its last token."""
    model = AutoModelForCausalLM.from_pretrained(pipeline / "target", dtype=torch.float32)
    with torch.no_grad():
        layers, last = [], model.model.layers[-1].register_forward_hook(lambda _m, _i, out: layers.append(out))
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        last.remove()
    return {"features": torch.cat([hidden[1], layers[0]], dim=-1)[0, :-1], "hidden": hidden[-1][0, :-1]}


@of_features
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_that_are_written_are_read(pipeline, kind, tmp_path, tokenizer, dtype):
    make_cache(configured(pipeline, kind, tmp_path / "cache", feature_dtype=dtype))
    index = found_in(pipeline, kind, tmp_path / "cache")
    collate = CachedCollator(CompletionCollator(tokenizer), index)
    examples = examples_of(pipeline)
    samples = [examples[i] for i in (3, 11, 0, 7)]
    batch = collate(samples)
    found = cached_states(batch["teacher"])
    rows, columns = batch["input_ids"].shape
    assert found["features"].shape == (rows, columns, 64) and found["hidden"].shape == (rows, columns, 32)
    for row, sample in enumerate(samples):
        for name, expected in states_by_hand(pipeline, sample["input_ids"]).items():
            states = found[name][row]
            assert states.dtype == getattr(torch, dtype)
            rounding = {"rtol": 0, "atol": 1e-5} if dtype == "float32" else {"rtol": 2**-8, "atol": 1e-5}
            torch.testing.assert_close(states[: len(expected)].float(), expected, **rounding)
            assert not states[len(expected) :].any()


def test_a_family_without_such_layers_is_refused(pipeline, tmp_path, tokenizer):
    torch.manual_seed(0)
    other = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=4, n_head=2))
    save_model(other, tokenizer, tmp_path / "target")
    config = configured(pipeline, FEATURES, tmp_path / "cache", layer_ids=None)
    with pytest.raises(InputError, match=r"^target: expected a model whose decoder has its layers in `layers`, .*GPT2"):
        make_cache(replace(config, target=str(tmp_path / "target")))


@of_features
def test_some_of_the_depths_are_looked_up_alone(pipeline, kind, whole):
    """Heads of several kinds learn from one cache."""
    index = found_in(pipeline, kind, whole[1])
    both, second = index.of_layers([1, 2]), index.of_layers([2])
    assert second.widths == {"features": 32, "hidden": 32} and both.widths["features"] == 64
    values = np.arange(3 * 64).reshape(3, 64)
    assert (second.picked(values) == values[:, 32:]).all() and both.picked(values) is values
    assert json.loads((whole[1] / "manifest.json").read_text())["settings"]["layer_ids"] == [1, 2]
    with pytest.raises(InputError, match=r"^layer_ids: expected some of \[1, 2\], after which .*, found \[2, 3\]; run"):
        index.of_layers([2, 3])


PAD = 1


def batch(*texts):
    """Return texts, of which all tokens but the first have labels, as the collator pads them."""
    width = max(map(len, texts))
    rows = [torch.tensor(text + [PAD] * (width - len(text))) for text in texts]
    labels = [torch.tensor([IGNORED, *text[1:], *[IGNORED] * (width - len(text))]) for text in texts]
    return {"input_ids": torch.stack(rows), "labels": torch.stack(labels)}


class Target:
    """Each token's state says how many tokens came up to it, and their sum."""

    def __init__(self):
        self.rows = []

    def __call__(self, ids_BT):
        self.rows += ids_BT.tolist()
        count = torch.arange(1.0, ids_BT.shape[1] + 1).expand(ids_BT.shape)
        return torch.stack([count, ids_BT.cumsum(1).float()], dim=-1)


def test_a_text_that_comes_again_needs_no_forward():
    kept, target = StateCache(), Target()
    a, b, c = [5, 6, 7, 8], [5, 6], [9, PAD, PAD]  # the last one ends in what pads
    first = kept.of(batch(a, b), target)
    assert torch.equal(first[0], Target()(torch.tensor([a]))[0])
    assert torch.equal(first[1, :2], Target()(torch.tensor([b]))[0]) and not first[1, 2:].any()
    again = kept.of(batch(b, c, a), target)
    assert target.rows == [a, [*b, PAD, PAD], c] and len(kept) == 3
    assert torch.equal(again[2], first[0]) and torch.equal(again[0], first[1])
    assert torch.equal(again[1, :3], Target()(torch.tensor([c]))[0])


def test_texts_that_begin_alike_are_told_apart():
    kept, target = StateCache(), Target()
    kept.of(batch([5, 6, 7]), target)
    assert torch.equal(kept.of(batch([5, 6]), target), Target()(torch.tensor([[5, 6]])))
