"""Draft models, parallel drafts and all heads from a cache of features: what they are with the target."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from listening import listened
from pipelines import LAST_BITS, configured, eagle_configured, furthest, heads_configured, history
from process_jobs import distilled, eagled
from processes import forked
from safetensors.torch import load_file

from draftsmith.decode.errors import InputError
from draftsmith.distill import __main__ as distill
from draftsmith.distill.config import DraftInit
from draftsmith.medusa.eagle import __main__ as eagle
from draftsmith.medusa.heads import __main__ as medusa
from draftsmith.train.cli import flags_of, run
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache

TRAINING = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
PACKED = {"packing": True, "max_length": 60, "training": {"per_device_train_batch_size": 2}}


@pytest.fixture(scope="module")
def cached(pipeline, tmp_path_factory) -> Path:
    """Caches with features in both dtypes, of the last states alone and of distributions."""
    root = tmp_path_factory.mktemp("cached")
    texts = [str(pipeline / name) for name in ("short", "long", "heldout")]
    half = {"features": True, "layer_ids": [1, 2], "batch_size": 4, "dtype": "float32"}
    whole = half | {"feature_dtype": "float32"}
    for name, options in {"whole": whole, "half": half, "last": whole | {"layer_ids": []}, "laws": {}}.items():
        make_cache(CacheConfig(str(pipeline / "target"), texts, str(root / name), **options))
    return root


def trained(kind: str, pipeline: Path, output: Path, cached: Path | None = None, name: str | Path = "whole", **options):
    options = {"temperature": 0.8, "heldout": [str(pipeline / "heldout")]} | options
    options["training"] = TRAINING | options.get("training", {})
    if cached is not None:
        options |= {"teacher_cache": [str(cached / name)]}  # or `name` as it is
    if kind == "draft":
        return distill.distill(configured(pipeline, output, **options))
    if kind == "eagle":
        return eagle.train_heads(eagle_configured(pipeline, output, **{"layer_ids": [1, 2]} | options))
    return medusa.train_heads(heads_configured(pipeline, output, **options))


CASES = {
    "a draft of few tokens, prompts too, cut texts": (
        "draft",
        {"init": DraftInit(draft_vocabulary=40), "divergence": "tvd", "prompt_loss": True, "max_length": 16},
    ),
    "a random draft with the target's embeddings": (
        "draft",
        {
            "draft": None, "init": DraftInit(config={"num_hidden_layers": 1}, share="embeddings"),
            "optimizer": "trainer",  # Muon makes whole steps of a matrix's last bits
        },
    ),
    "a parallel draft, packed rows": ("draft", PACKED | {"parallel": 3, "top_k": 20, "top_p": 0.9}),
    "Medusa heads of few tokens, one head for all, packed rows": (
        "medusa",
        PACKED | {"draft_vocabulary": 40, "lm_heads": "shared"},
    ),
    "Hydra heads, prompts too, cut texts": ("medusa", {"hydra": True, "prompt_loss": True, "max_length": 16}),
    "Hydra heads, hard labels": ("medusa", {"hydra": True, "divergence": "cross_entropy", "heldout": 0.3}),
    "EAGLE-3 heads, cut vocabulary, random": (
        "eagle",
        {"draft_vocabulary": 40, "init": "random", "fc_norm": True, "top_k": 20},
    ),
    "EAGLE-3 heads, packed rows": ("eagle", PACKED),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_it_is_with_the_target(pipeline, cached, tmp_path, capsys, case):
    """Step for step: the first look, losses, gradients, all metrics, and the weights."""
    kind, options = CASES[case]
    live = trained(kind, pipeline, tmp_path / "live", **options)
    looks = [line for line in capsys.readouterr().err.splitlines() if line.startswith("init:")]
    found = trained(kind, pipeline, tmp_path / "cached", cached, **options)
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("init:")] == looks
    assert found.target is None
    losses = history(live, "loss")
    assert len(losses) == len(set(losses)) == 4
    assert history(found, "loss") == pytest.approx(losses, rel=1e-5, abs=1e-6)
    assert history(found, "grad_norm") == pytest.approx(history(live, "grad_norm"), rel=1e-4)
    metrics = {key for entry in live.state.log_history for key in entry if key.startswith("eval_")}
    metrics = {key for key in metrics if "per_second" not in key and key != "eval_runtime"}
    assert {"eval_loss", "eval_alpha", "eval_mean_acceptance_length"} <= metrics
    for metric in metrics:
        assert history(found, metric) == pytest.approx(history(live, metric), rel=1e-5, abs=1e-6)
    saved, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("cached", "live"))
    learned = [{n: w for n, w in weights.items() if w.is_floating_point()} for weights in (saved, expected)]
    assert furthest(*learned) < LAST_BITS


def test_half_precision_rounds_and_no_more(pipeline, cached, tmp_path):
    whole, half = (trained("eagle", pipeline, tmp_path / name, cached, name) for name in ("whole", "half"))
    assert history(half, "loss") == pytest.approx(history(whole, "loss"), rel=1e-2)
    assert history(half, "loss") != history(whole, "loss")


@pytest.mark.parametrize("kind", ["draft", "medusa"])
def test_the_last_states_are_all_that_is_read(pipeline, cached, tmp_path, kind):
    """A cache without features is enough, and of one that has them only the last states are read."""
    (shard,) = (cached / "last").glob("short-*.parquet")
    assert pq.read_schema(shard).names == ["id", "text", "hidden"]
    spoilt = Path(shutil.copytree(cached / "whole", tmp_path / "whole"))
    for file in spoilt.glob("*.parquet"):
        columns = pq.ParquetFile(file).metadata
        content = bytearray(file.read_bytes())
        for group in range(columns.num_row_groups):
            features = columns.row_group(group).column(2)
            assert features.path_in_schema.startswith("features")
            end = features.data_page_offset + features.total_compressed_size
            content[end - 64 : end] = b"\xff" * 64
        file.write_bytes(content)
        with pytest.raises(OSError, match="CRC"):
            pq.ParquetFile(file, page_checksum_verification=True).read(["features"])
    one, other = (trained(kind, pipeline, tmp_path / name, cached, of) for name, of in (("a", "last"), ("b", spoilt)))
    assert history(one, "loss") == history(other, "loss")


def test_a_draft_is_carved_from_weights_and_learns_from_a_cache(pipeline, cached, tmp_path, capsys):
    """The layers are the target's own, which a cache does not have; the choice between them is the same."""
    carved = {"draft": None, "init": DraftInit(layers=1)}
    live = trained("draft", pipeline, tmp_path / "live", **carved)
    teacher = {"teacher_cache": [str(cached / "last")]}
    found = trained("draft", pipeline, tmp_path / "cached", **carved, **teacher)
    assert history(found, "loss") == pytest.approx(history(live, "loss"), rel=1e-6, abs=5e-6)
    looks = [line for line in capsys.readouterr().err.splitlines() if line.startswith("init:")]
    assert len(looks) == 2 and looks[0] == looks[1]


@pytest.mark.slow
@pytest.mark.parametrize(("job", "strategy"), [(distilled, "ddp"), (eagled, "zero3")])
def test_two_processes_are_one(pipeline, cached, tmp_path, job, strategy):
    """Each reads the features of its own rows, and has the embeddings and the head whole."""
    source = {"teacher_cache": [str(cached / "whole")]}
    source |= {"layer_ids": [1, 2]} if job is eagled else {}
    run = {**source, "heldout": [str(pipeline / "heldout")], "training": TRAINING | {"max_steps": 3}}
    (one,) = forked(job, pipeline, tmp_path / "one", {"run": run}, strategy="one")
    for rank in forked(job, pipeline, tmp_path / "two", {"run": run}, strategy=strategy):
        assert rank["run"]["ran"]["num_processes"] == 2
        for key in ("loss", "eval_loss", "eval_mean_acceptance_length"):
            found, expected = (
                [entry[key] for entry in log if key in entry] for log in (rank["run"]["log"], one["run"]["log"])
            )
            assert found == pytest.approx(expected, rel=1e-5) and found
    saved, expected = (load_file(tmp_path / name / "run" / "model.safetensors") for name in ("two", "one"))
    assert furthest(saved, expected) < LAST_BITS


def test_what_does_not_fit_is_refused_in_one_line(pipeline, cached, tmp_path):
    def refused(kind: str, message: str, name: str = "whole", **options: object) -> None:
        with pytest.raises(InputError, match=message) as error:
            trained(kind, pipeline, tmp_path / "out", cached, name, **options)
        assert "\n" not in str(error.value)

    refused("medusa", "^backbone: expected frozen with teacher_cache, .* found lora$", backbone="lora")
    refused("medusa", r"expected schema 'draftsmith\.features/2', found 'draftsmith\.teacher/2'", "laws")
    refused("draft", "^prompt_loss: expected false with .*laws, whose", "laws", temperature=1.0, prompt_loss=True)
    refused("draft", "^on_policy: expected 0 with teacher_cache", on_policy=0.5)
    refused("eagle", r"^layer_ids: expected some of \[\], after which", "last")
    refused("eagle", "^target_sharded: expected false with teacher_cache", target_sharded=True)
    mixed = [str(cached / "laws"), str(cached / "whole")]
    with pytest.raises(InputError, match=r"expected schema 'draftsmith\.teacher/2', found 'draftsmith\.features/2'"):
        distill.distill(configured(pipeline, tmp_path / "out", teacher_cache=mixed))
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_the_command_trains_on_a_cache(pipeline, cached, tmp_path):
    training = {"output_dir": tmp_path / "out", "max_steps": 1, "use_cpu": "true", "report_to": "none"}
    argv = ["--target", str(pipeline / "target"), "--completions", f"[{pipeline / 'short'}]", "--layer_ids", "[1, 2]"]
    argv += ["--teacher_cache", f"[{cached / 'half'}]"]
    argv += flags_of({f"training.{name}": value for name, value in training.items()})
    with listened() as heard:
        assert run(lambda: eagle.main(argv)) == 0
    heard.require(
        "reading completions", "finding what is cached", "making the heads", "saving what was trained", trains=True
    )
    assert (tmp_path / "out" / "model.safetensors").is_file()
