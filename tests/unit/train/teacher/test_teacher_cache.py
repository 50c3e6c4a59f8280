"""Cached laws: what a bucket knows of a law, and what the disk keeps of it."""

import errno
import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import tiny_llama
from transformers import AutoModelForCausalLM

from draftsmith.decode.errors import InputError
from draftsmith.decode.sampling import Sampler
from draftsmith.scripts import cache as command
from draftsmith.train.cli import run
from draftsmith.train.data.collator import CompletionCollator
from draftsmith.train.data.examples import training_examples
from draftsmith.train.data.generate import PrepareConfig, load_completions, prepare
from draftsmith.train.data.shards import COLUMNS, read_shard, write_shard
from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.chunked import chunked_features, chunked_sum
from draftsmith.train.losses.distributions import CachedDistributions, LiveDistributions
from draftsmith.train.losses.divergences import DIVERGENCES
from draftsmith.train.losses.objective import NAMES, Objective
from draftsmith.train.losses.output_head import OutputHead
from draftsmith.train.recipe import RecipeConfig
from draftsmith.train.replay_metrics import replay_features
from draftsmith.train.runs import save_model
from draftsmith.train.teacher import cache_writer as teacher_cache
from draftsmith.train.teacher import distribution_shards
from draftsmith.train.teacher.cache_reader import CachedCollator, cached_distributions, find_distributions
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache

N, V = 40, 23
FOLLOWS = torch.tensor([i % 7 != 0 for i in range(N)])
LAWS = {"full": {}, "warm": {"temperature": 0.7}, "cut": {"temperature": 0.8, "top_k": 9, "top_p": 0.9}}
# The reverse KL is infinite where p is cut, and refused.
PAIRS = [(name, sampler) for name in NAMES for sampler in LAWS if (name, sampler) != ("reverse_kl", "cut")]


def drawn(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(N, V, generator=generator) * 2 for _ in range(2))
    return p, q, torch.randint(V, (N,), generator=generator)


def warped(temperature: float = 1.0, **sampler: float) -> Sampler:
    return Sampler.of(temperature, **sampler)


def cached(p: torch.Tensor, labels: torch.Tensor, k: int, **sampler: float) -> CachedDistributions:
    return CachedDistributions.of(p, labels, warped(**sampler), k)


def objectives(name: str, **sampler: float) -> Objective:
    return Objective({name: 1.0}, draft_length=3, **sampler)


@pytest.mark.parametrize(("name", "sampler"), PAIRS)
def test_with_all_tokens_everything_is_that_of_the_full_law(name, sampler):
    p, q, labels = drawn()
    objective = objectives(name, **LAWS[sampler])
    values, gradients = [], []
    for source in (p, cached(p, labels, V, **LAWS[sampler])):
        own = q.clone().requires_grad_(True)
        value = objective.shortfall(objective.features(source, own, labels), FOLLOWS)
        values.append(value.item())
        gradients.append(torch.autograd.grad(value, own)[0])
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    assert torch.allclose(*gradients, atol=1e-5)
    assert gradients[0].abs().sum() > 0


@pytest.mark.parametrize("sampler", LAWS)
def test_with_all_tokens_replay_is_that_of_the_full_law(sampler):
    p, q, labels = drawn()
    warping = warped(**LAWS[sampler])
    full = replay_features(p, q, labels, warping)
    assert torch.allclose(full, replay_features(cached(p, labels, V, **LAWS[sampler]), q, labels, warping), atol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 5, 22])
@pytest.mark.parametrize(("name", "sampler"), [pair for pair in PAIRS if pair[0] in DIVERGENCES])
def test_a_bucket_bounds_every_divergence_from_below(name, sampler, k):
    """Data processing: merging outcomes makes no f-divergence larger; and k + 1 outcomes are a merging of k + 2."""
    p, q, labels = drawn(k)
    objective = objectives(name, **LAWS[sampler])
    full, bucket, finer = (
        objective.features(source, q, labels)[:, 0]
        for source in (p, cached(p, labels, k, **LAWS[sampler]), cached(p, labels, k + 1, **LAWS[sampler]))
    )
    rounding = 1e-5 * full.max()
    assert (bucket <= finer + rounding).all() and (finer <= full + rounding).all()
    assert (bucket >= -rounding).all() and bucket.sum() > 0
    if k == 1 and sampler != "cut":
        assert (bucket < full - 1e-4).any()


@pytest.mark.parametrize("k", [1, 2, 5, 22])
@pytest.mark.parametrize("sampler", LAWS)
def test_replay_bounds_acceptance_and_knows_the_rest(sampler, k):
    """0 ≤ α_bucket − α ≤ min(p_tail, q_tail), and the same of the block terms' overlap; a and agreement are exact."""
    p, q, labels = drawn(k)
    warping = warped(**LAWS[sampler])
    bucket = cached(p, labels, k, **LAWS[sampler])
    full, found = replay_features(p, q, labels, warping), replay_features(bucket, q, labels, warping)
    assert torch.allclose(full[:, 0], found[:, 0], atol=1e-6)
    assert torch.equal(full[:, 3], found[:, 3])
    q_law = warping.probabilities(q, [])
    tails = torch.minimum(bucket.log_tail.exp(), 1 - q_law.gather(1, bucket.ids).sum(-1))
    gap = found[:, 1] - full[:, 1]
    assert (gap >= -1e-6).all() and (gap <= tails + 1e-6).all()
    known = (bucket.ids == q.argmax(-1, keepdim=True)).any(-1)
    assert torch.allclose(full[known, 2], found[known, 2], atol=1e-6)
    assert (found[~known, 2] == 0).all()
    assert (full[~known, 2] <= bucket.log_p.exp()[~known, -1] + 1e-6).all()  # less probable than the k-th
    features = Objective({"expected_length": 1.0}, **LAWS[sampler]).features(bucket, q, labels)
    assert torch.allclose(features[:, 2], found[:, 1], atol=1e-6)
    of_full = Objective({"expected_length": 1.0}, **LAWS[sampler]).features(p, q, labels)
    assert torch.allclose(features[:, 1], of_full[:, 1], rtol=1e-5, atol=1e-5)


def test_a_tail_is_summed_over_its_own_tokens():
    """In float32, 1 − Σ q of the others would be 0 here, and so would its gradient."""
    scores = torch.tensor([[30.0, 29.0, 1.0, -2.0, 0.5]], requires_grad=True)
    sampler = CachedDistributions(
        torch.tensor([[0, 1]], dtype=torch.int32), *(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1))
    )
    found = sampler.bucket(scores.log_softmax(-1))
    exact = scores.detach().double().log_softmax(-1)
    assert found[0, 2].item() == pytest.approx(exact[0, 2:].logsumexp(-1).item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(found[0, 2], scores)
    assert gradient[0, 2:].sum().item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("k", [1, 3, V])
@pytest.mark.parametrize(("name", "sampler"), PAIRS)
def test_extreme_laws_give_finite_gradients(name, sampler, k):
    p, q = torch.full((4, V), -1e4), torch.full((4, V), -1e4)
    p[0, 3], q[0, 7], p[1, 3], q[1, 3], p[2, 3], q[3, 3] = (1e4,) * 6
    labels = torch.tensor([3, 3, 7, 7])
    bucket = cached(p, labels, k, **LAWS[sampler])
    own = q.requires_grad_(True)
    objective = objectives(name, **LAWS[sampler])
    features = objective.features(bucket, own, labels)
    loss = objective.shortfall(features, torch.tensor([False, True, True, True]))
    (gradient,) = torch.autograd.grad(loss, own)
    assert loss.isfinite() and gradient.isfinite().all()
    assert replay_features(bucket, own.detach(), labels, Sampler.of(0.8)).isfinite().all()


def test_among_equals_the_argmax_comes_first():
    p = torch.zeros(3, V)
    p[1, 5:9] = 2.0
    p[2, 11] = 1.0
    for k in (1, 4, V):
        sampler = cached(p, torch.zeros(3, dtype=torch.long), k)
        assert torch.equal(sampler.ids[:, 0], p.argmax(-1))
        assert all(len(set(row)) == k for row in sampler.ids.tolist())


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_the_lean_loss_slices_a_cached_law(chunk_size):
    """Value, features and gradients are those of all positions at once, in half precision, too."""
    generator = torch.Generator().manual_seed(0)
    p, _, labels = drawn()
    hidden, weight = torch.randn(N, 8, generator=generator), torch.randn(V, 8, generator=generator)
    sampler = cached(p, labels, 4)
    sampler = CachedDistributions(sampler.ids.int(), sampler.log_p.half(), sampler.log_tail, sampler.log_p_of_text)
    objective = Objective({"forward_kl": 0.5, "expected_length": 1.0})
    weights, sizes = torch.rand(N, 3, generator=generator), ChunkSizes(chunk_size * V, 3 * V)
    leaves = [hidden.requires_grad_(True), weight.requires_grad_(True)]
    values = objective.features(sampler, hidden @ weight.T, labels)
    found, features = chunked_sum(objective.features, weights, labels, hidden, OutputHead(weight), sampler, sizes)
    assert torch.allclose(features, values, atol=1e-5)
    assert torch.allclose(
        chunked_features(objective.features, labels, hidden, OutputHead(weight), sampler, sizes), features
    )
    eager = torch.autograd.grad((values * weights).sum(), leaves)
    for a, b in zip(eager, torch.autograd.grad(found, leaves), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_a_live_law_and_a_cached_one_are_interchangeable():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, 6, generator=generator), torch.randn(V, 6, generator=generator)
    _, q, labels = drawn()
    head = OutputHead(torch.eye(V))
    live = LiveDistributions(hidden, OutputHead(weight, softcap=3.0))
    stored = cached(live.chunk(slice(None))(slice(None)), labels, V)
    objective = Objective({"jsd": 1.0, "reached_tvd": 1.0})
    one, other = (
        chunked_features(objective.features, labels, q, head, sampler, ChunkSizes(9 * V, 3 * V))
        for sampler in (live, stored)
    )
    assert torch.allclose(one, other, atol=1e-5)


# On disk


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


def configured(pipeline: Path, output: Path, **options) -> CacheConfig:
    options = {"completions": [str(pipeline / "short"), str(pipeline / "long")], "k": 8, "batch_size": 2} | options
    return CacheConfig(str(pipeline / "target"), output=str(output), **options)


def found_in(pipeline: Path, *caches: Path, vocab_size: int = 300, **options):
    options = {"completions": [str(pipeline / "short"), str(pipeline / "long")]} | options
    config = RecipeConfig(**{"target": str(pipeline / "target")} | options)
    return find_distributions([str(cache) for cache in caches], config, vocab_size)


@pytest.fixture(scope="module")
def whole(pipeline, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "cache"
    with redirect_stdout(io.StringIO()) as said:
        summary = make_cache(configured(pipeline, output))
    return summary, output, said.getvalue().splitlines()


def by_hand(pipeline: Path, sample: dict, sampler: Sampler, k: int) -> CachedDistributions:
    """A sample's laws, from the library's own forward of the sample alone."""
    model = AutoModelForCausalLM.from_pretrained(pipeline / "target", dtype=torch.float32)
    ids = torch.tensor([sample["input_ids"]])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1, :300]
    inside = torch.tensor([label != -100 for label in sample["labels"][1:]])
    return CachedDistributions.of(logits[inside].contiguous(), ids[0, 1:][inside], sampler, k)


@pytest.mark.parametrize("k", [8, 300])
def test_what_is_written_is_read(pipeline, tmp_path, tokenizer, k):
    sampler = {"temperature": 0.8, "top_p": 0.95}
    make_cache(configured(pipeline, tmp_path / "cache", k=k, **sampler))
    distributions = found_in(pipeline, tmp_path / "cache", **sampler)
    examples = training_examples([str(pipeline / "short"), str(pipeline / "long")])
    collate = CachedCollator(CompletionCollator(tokenizer), distributions)
    samples = [examples[i] for i in (3, 11, 0, 7)]
    batch = collate(samples)
    assert next(iter(batch)) == "input_ids" and next(reversed(batch)) == "teacher"
    assert not any(column.is_floating_point() for column in batch["teacher"].values())
    found = cached_distributions(batch["teacher"])
    expected = CachedDistributions.concatenated(
        [by_hand(pipeline, sample, Sampler.of(**sampler), k) for sample in samples]
    )
    assert len(found) == len(expected) == int((batch["labels"][:, 1:] != -100).sum())
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


def test_cut_samples_have_the_first_of_their_laws(pipeline, whole, tokenizer):
    _, output, _ = whole
    path = [str(pipeline / "long")]
    long = training_examples(path)
    most = max(long.lengths) - 4
    cut = training_examples(path, most)
    whole_laws, cut_laws = found_in(pipeline, output), found_in(pipeline, output, max_length=most)
    at = max(range(len(long)), key=lambda i: len(long[i]["input_ids"]))
    a, b = (
        cached_distributions(CachedCollator(CompletionCollator(tokenizer), distributions)([examples[at]])["teacher"])
        for distributions, examples in ((whole_laws, long), (cut_laws, cut))
    )
    assert len(b) == len(a) - 4 > 0
    assert torch.equal(a.ids[:-4], b.ids) and torch.equal(a.log_p_of_text[:-4], b.log_p_of_text)


def test_packed_rows_have_their_samples_laws_in_order(pipeline, whole, tokenizer):
    _, output, _ = whole
    collate = CachedCollator(CompletionCollator(tokenizer), found_in(pipeline, output))
    examples = training_examples([str(pipeline / "short"), str(pipeline / "long")])
    order = [(9, 2), (4, 6, 1)]
    rows = []
    for members in order:
        samples = [examples[i] for i in members]
        rows.append(
            {
                "texts": [text for sample in samples for text in sample["texts"]],
                "input_ids": [token for sample in samples for token in sample["input_ids"]],
                "labels": [label for sample in samples for label in sample["labels"]],
                "position_ids": [i for sample in samples for i in range(len(sample["input_ids"]))],
            }
        )
    packed = collate(rows)["teacher"]
    alone = [collate([examples[i]])["teacher"] for members in order for i in members]
    for name, column in packed.items():
        assert torch.equal(column, torch.cat([part[name] for part in alone]))


def test_the_estimate_comes_first_and_is_not_exceeded(pipeline, whole):
    summary, output, said = whole
    positions = sum(
        sum(mask) for path in ("short", "long") for mask in load_completions(str(pipeline / path))["loss_mask"]
    )
    assert (summary.samples, summary.written, summary.kept) == (12, 12, 0)
    assert summary.positions == summary.positions_written == positions
    assert summary.size == sum(file.stat().st_size for file in output.glob("*.parquet"))
    assert summary.bytes_per_token == summary.size / positions
    (line,) = said
    assert f"{positions} positions × 56 bytes at k=8" in line and " MB free" in line


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


class Killed(Exception):
    pass


def test_a_killed_run_goes_on_where_it_stopped(pipeline, whole, tmp_path, monkeypatch, capsys):
    output, calls = tmp_path / "cache", []
    real = distribution_shards._write_shard

    def killed(path, *args):
        if len(calls) == 2:
            (output / ".000-shard-00001.parquet.partial").write_bytes(b"half")
            raise Killed
        calls.extend([1] if path.suffix == ".parquet" else [])  # not of the trial
        real(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(distribution_shards, "_write_shard", killed)
        with pytest.raises(Killed):
            make_cache(configured(pipeline, output))
    assert len(list(output.glob("*.parquet"))) == 2
    capsys.readouterr()
    summary = make_cache(configured(pipeline, output))
    assert (summary.kept, summary.written, summary.samples) == (5, 7, 12)
    assert contents(output) == contents(whole[1])
    monkeypatch.setattr(teacher_cache, "load_model", None)  # nothing is missing: no model is loaded
    again = make_cache(configured(pipeline, output))
    assert (again.kept, again.written, again.bytes_per_token) == (12, 0, whole[0].bytes_per_token)
    assert capsys.readouterr().out.count("\n") == 1


def test_a_damaged_shard_is_written_again(pipeline, whole, tmp_path):
    output = tmp_path / "cache"
    shutil.copytree(whole[1], output)
    damage(output / "001-shard-00001.parquet")
    summary = make_cache(configured(pipeline, output))
    assert (summary.kept, summary.written) == (9, 3)
    assert contents(output) == contents(whole[1])


def damage(file: Path) -> None:
    """Flip a bit among the numbers; names, checksums and the footer stay whole."""
    column = pq.read_metadata(file).row_group(0).column(3)
    assert column.path_in_schema == "log_p.list.element"
    data = bytearray(file.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    file.write_bytes(bytes(data))


def test_less_space_than_the_estimate_is_refused(pipeline, tmp_path, monkeypatch):
    monkeypatch.setattr(teacher_cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match=r"^output: expected 0\.0 MB of free space for .*, found 0\.0 MB; free"):
        make_cache(configured(pipeline, tmp_path / "cache"))
    assert not list((tmp_path / "cache").glob("*.parquet"))


def beyond(shard: pa.Table) -> pa.Table:
    ids = [[2**30] * len(row) for row in shard["input_ids"].to_pylist()]
    return shard.set_column(3, COLUMNS.field(3), pa.array(ids, COLUMNS.field(3).type))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda shard: shard.slice(0, 0), "expected samples, found none$"),
        (beyond, "found token 1073741824 with a vocabulary"),
    ],
    ids=["no rows", "ids beyond the vocabulary"],
)
def test_completions_that_no_target_wrote_are_refused(pipeline, tmp_path, changed, message):
    shutil.copytree(pipeline / "short", tmp_path / "short")
    file = tmp_path / "short" / "shard-00000.parquet"
    write_shard(file, changed(read_shard(file)))
    with pytest.raises(InputError, match=rf"shard-00000\.parquet: .*{message}"):
        make_cache(configured(pipeline, tmp_path / "cache", completions=[str(tmp_path / "short")]))


def test_a_full_disk_is_told_in_one_line_and_keeps_what_is_there(pipeline, whole, tmp_path, monkeypatch):
    output, real = tmp_path / "cache", distribution_shards.write_shard

    def full(path, *args, **options):
        if path.name == "001-shard-00000.parquet":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(distribution_shards, "write_shard", full)
        with pytest.raises(InputError, match=r"no space left .* 5 of 12 samples are kept; free") as error:
            make_cache(configured(pipeline, output))
    assert "\n" not in str(error.value)
    assert make_cache(configured(pipeline, output)).kept == 5
    assert contents(output) == contents(whole[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 9}, "^k: expected 8, found 9; .* begun with other settings"),
        ({"temperature": 0.5}, r"^temperature: expected 1\.0, found 0\.5"),
        ({"top_p": 0.5}, r"^top_p: expected 1\.0, found 0\.5"),
        ({"completions": ["long"]}, "^completions: expected .*short, .*long as they were, found .*long; "),
        ({"k": 301}, "^k: expected at most the target's 300 tokens, found 301"),
    ],
)
def test_a_cache_is_not_resumed_otherwise(pipeline, whole, options, message):
    if "completions" in options:
        options = {"completions": [str(pipeline / name) for name in options["completions"]]}
    with pytest.raises(InputError, match=message):
        make_cache(configured(pipeline, whole[1], **options))


def test_laws_of_another_target_are_refused(pipeline, whole, tmp_path, tokenizer):
    save_model(tiny_llama(5, len(tokenizer) + 13), tokenizer, tmp_path / "other")
    with pytest.raises(InputError, match=r"^target: expected .* as it was \(model\.safetensors"):
        make_cache(CacheConfig(str(tmp_path / "other"), configured(pipeline, whole[1]).completions, str(whole[1]), k=8))
    with pytest.raises(InputError, match=r"^teacher_cache: expected a cache of .*other, found in .*safetensors is a"):
        found_in(pipeline, whole[1], target=str(tmp_path / "other"))
    with pytest.raises(InputError, match=r"^teacher_cache: expected 299 tokens, found 300 in"):
        found_in(pipeline, whole[1], vocab_size=299)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.7}, r"^temperature: expected 1\.0, which .* was written at, found 0\.7"),
        ({"top_k": 5}, "^top_k: expected 0, .* found 5"),
        ({"top_p": 0.9}, r"^top_p: expected 1\.0, .* found 0\.9"),
    ],
)
def test_training_under_another_law_is_refused(pipeline, whole, options, message):
    with pytest.raises(InputError, match=message):
        found_in(pipeline, whole[1], **options)


def test_what_is_missing_is_named(pipeline, whole, tmp_path):
    output = tmp_path / "cache"
    with pytest.raises(InputError, match=f"expected a cache written by draftsmith cache, found none at {output}"):
        found_in(pipeline, output)
    shutil.copytree(whole[1], output)
    (output / "001-shard-00001.parquet").unlink()
    lacking = load_completions(str(pipeline / "long"))["id"][3:6]
    message = f"expected all 7 samples of .*long, found none in {output} for {', '.join(lacking)}; run draftsmith"
    with pytest.raises(InputError, match=message):
        found_in(pipeline, output)
    (output / "001-shard-00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"001-shard-00000\.parquet: expected a shard of a teacher cache, found a"):
        found_in(pipeline, output)
    (output / "manifest.json").write_text(json.dumps({"schema": "draftsmith.completions/1"}))
    with pytest.raises(InputError, match=r"expected schema 'draftsmith\.teacher/1', found 'draftsmith\.completions/1'"):
        found_in(pipeline, output)


def test_other_completions_are_refused(pipeline, whole, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("x = 1\n")
    prepare(PrepareConfig(str(pipeline / "target"), str(prompts), str(tmp_path / "other"), max_new_tokens=4))
    with pytest.raises(InputError, match=r"^teacher_cache: expected a cache of the completions .*other as they are"):
        found_in(pipeline, whole[1], completions=[str(tmp_path / "other")])
    # A shard of other texts under the manifest of these.
    shutil.copytree(pipeline / "short", tmp_path / "short")
    shutil.copy(pipeline / "long" / "shard-00000.parquet", tmp_path / "short" / "shard-00000.parquet")
    with pytest.raises(InputError, match=r"found none in .* for "):
        found_in(pipeline, whole[1], completions=[str(tmp_path / "short")])


def test_damage_among_the_numbers_is_found_when_they_are_read(pipeline, whole, tmp_path, tokenizer):
    output = tmp_path / "cache"
    shutil.copytree(whole[1], output)
    damage(output / "000-shard-00000.parquet")
    collate = CachedCollator(CompletionCollator(tokenizer), found_in(pipeline, output))
    examples = training_examples([str(pipeline / "short")])
    with pytest.raises(InputError, match=r"000-shard-00000\.parquet: expected a shard of a teacher cache, found a dam"):
        for example in examples:
            collate([example])


def test_caches_of_one_k_cover_completions_together(pipeline, tmp_path):
    for name, k in (("short", 8), ("long", 8), ("fine", 9)):
        completions = [str(pipeline / ("long" if name == "fine" else name))]
        make_cache(configured(pipeline, tmp_path / name, completions=completions, k=k))
    distributions = found_in(pipeline, tmp_path / "short", tmp_path / "long")
    assert (distributions.k, len(distributions.places)) == (8, 12)
    with pytest.raises(InputError, match=r"expected caches of one k, found 8 in .*short and 9 in .*fine"):
        found_in(pipeline, tmp_path / "short", tmp_path / "fine")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"completions": []}, "completions: expected at least one directory"),
        ({"k": 0}, "k: expected at least 1, found 0"),
        ({"temperature": 0.0}, "temperature: expected a finite number, more than 0"),
        ({"top_k": -1}, "top_k: expected at least 0"),
        ({"top_p": 1.5}, "top_p: expected more than 0 and at most 1"),
        ({"dtype": "int8"}, "dtype: expected one of float32"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(InputError, match=message):
        CacheConfig("target", **({"completions": ["c"]} | options), output="o")


def test_the_command_writes_a_cache(pipeline, tmp_path, capsys):
    argv = [
        "--target",
        str(pipeline / "target"),
        "--completions",
        f"[{pipeline / 'short'}]",
        "--output",
        str(tmp_path / "c"),
    ]
    assert run(lambda: command.main([*argv, "--k", "4"])) == 0
    out = capsys.readouterr().out
    assert "positions × 32 bytes at k=4" in out and "bytes a token" in out and "5 written now, 0 kept" in out
    assert run(lambda: command.main([*argv, "--k", "5"])) == 2
    assert "error: k: expected 4, found 5" in capsys.readouterr().err
