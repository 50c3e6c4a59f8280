"""EAGLE-3 heads from a cache of features: what they are with the target, and that its layers are not there."""

import shutil

import pytest
import torch
from listening import listened
from pipelines import LAST_BITS, eagle_configured, furthest, history
from process_jobs import eagled
from processes import forked
from safetensors.torch import load_file

from draftsmith.medusa.eagle import __main__ as command
from draftsmith.train.cli import run
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache

TRAINING = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
METRICS = ("loss", "mean_acceptance_length", "alpha", "accuracy_1", "alpha_1", "accuracy_3", "alpha_3")
DEPTHS = [1, 2]


@pytest.fixture(scope="module")
def cached(pipeline, tmp_path_factory):
    """Caches in both dtypes, of other depths, and of distributions; and the target as it is without its weights."""
    root = tmp_path_factory.mktemp("cached")
    texts = [str(pipeline / name) for name in ("short", "long", "heldout")]
    shared = {"features": True, "layer_ids": DEPTHS, "batch_size": 4, "dtype": "float32"}
    for name, options in {
        "whole": shared | {"feature_dtype": "float32"},
        "half": shared,
        "other": shared | {"layer_ids": [2]},
        "laws": {},
    }.items():
        make_cache(CacheConfig(str(pipeline / "target"), texts, str(root / name), **options))
    shutil.copytree(pipeline / "target", root / "target")
    (root / "target" / "model.safetensors").unlink()
    return root


def trained(pipeline, output, cached=None, name="whole", **options):
    options = {"layer_ids": DEPTHS, "temperature": 0.8, "heldout": [str(pipeline / "heldout")]} | options
    options["training"] = TRAINING | options.get("training", {})
    if cached is not None:
        options |= {"target": str(cached / "target"), "teacher_cache": [str(cached / name)]}
    return command.train_heads(eagle_configured(pipeline, output, **options))


def learned(trainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in trainer.heads.named_parameters()}


CASES = {
    "as it comes": {},
    "cut vocabulary, random": {"draft_vocabulary": 40, "init": "random", "fc_norm": True, "top_k": 20},
    "prompts too, cut texts": {"prompt_loss": True, "max_length": 16},
    "packed rows": {"packing": True, "max_length": 60, "training": {"per_device_train_batch_size": 2}},
    "hard labels": {"divergence": "cross_entropy", "heldout": 0.3},
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_it_is_with_the_target(pipeline, cached, tmp_path, case):
    """Step for step: losses, gradients, what is measured, and the heads; the last bits are of batches' shapes."""
    live = trained(pipeline, tmp_path / "live", **CASES[case])
    found = trained(pipeline, tmp_path / "cached", cached, **CASES[case])
    assert found.target is None
    losses = history(live, "loss")
    assert len(losses) == len(set(losses)) == 4
    assert history(found, "loss") == pytest.approx(losses, rel=1e-5)
    assert history(found, "grad_norm") == pytest.approx(history(live, "grad_norm"), rel=1e-4)
    for metric in METRICS:
        assert history(found, f"eval_{metric}") == pytest.approx(history(live, f"eval_{metric}"), rel=1e-5)
    assert furthest(learned(found), learned(live)) < LAST_BITS
    assert (tmp_path / "cached" / "README.md").is_file()


def test_half_precision_rounds_and_no_more(pipeline, cached, tmp_path):
    whole, half = (trained(pipeline, tmp_path / name, cached, name) for name in ("whole", "half"))
    assert history(half, "loss") == pytest.approx(history(whole, "loss"), rel=1e-2)
    assert history(half, "loss") != history(whole, "loss")
    for metric in METRICS:
        assert history(half, f"eval_{metric}") == pytest.approx(history(whole, f"eval_{metric}"), rel=2e-2, abs=2e-2)


def test_the_split_of_a_batch_changes_nothing(pipeline, cached, tmp_path):
    whole = trained(pipeline, tmp_path / "whole", cached)
    training = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "dataloader_num_workers": 1}
    split = trained(pipeline, tmp_path / "split", cached, training=training)
    assert history(split, "loss") == pytest.approx(history(whole, "loss"), rel=1e-5)
    assert furthest(learned(split), learned(whole)) < LAST_BITS


def test_a_run_goes_on_to_the_bit(pipeline, cached, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}
    whole = trained(pipeline, tmp_path / "whole", cached, training=saving)
    for name in ("model.safetensors", "checkpoint-4", "draftsmith.json"):  # as if it had ended behind step 2
        (tmp_path / "whole" / name).rename(tmp_path / name)
    rest = trained(pipeline, tmp_path / "whole", cached, training=saving)
    assert furthest(load_file(tmp_path / "model.safetensors"), learned(rest)) == 0
    assert history(rest, "loss") == history(whole, "loss")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_two_processes_are_one(pipeline, cached, tmp_path, strategy):
    """Each reads the features of its own rows, and has the embeddings and the head whole."""
    source = {"target": str(cached / "target"), "teacher_cache": [str(cached / "whole")], "layer_ids": DEPTHS}
    run = {**source, "heldout": [str(pipeline / "heldout")], "training": TRAINING | {"max_steps": 3}}
    (one,) = forked(eagled, pipeline, tmp_path / "one", {"run": run}, strategy="one")
    for rank in forked(eagled, pipeline, tmp_path / "two", {"run": run}, strategy=strategy):
        assert rank["run"]["ran"]["num_processes"] == 2
        for key in ("loss", *(f"eval_{metric}" for metric in METRICS)):
            found, expected = (
                [entry[key] for entry in log if key in entry] for log in (rank["run"]["log"], one["run"]["log"])
            )
            assert found == pytest.approx(expected, rel=1e-5) and found
    saved, expected = (load_file(tmp_path / name / "run" / "model.safetensors") for name in ("two", "one"))
    assert furthest(saved, expected) < LAST_BITS


def test_what_does_not_fit_is_refused_in_one_line(pipeline, cached, tmp_path, capsys):
    training = {"output_dir": tmp_path / "out", "max_steps": 1, "use_cpu": "true", "report_to": "none"}
    argv = ["--target", str(cached / "target"), "--completions", f"[{pipeline / 'short'}]", "--layer_ids", "[1, 2]"]
    cache = ["--teacher_cache", f"[{cached / 'half'}]"]
    argv += [part for name, value in training.items() for part in (f"--training.{name}", str(value))]

    def fails(*more: str) -> str:
        capsys.readouterr()
        given = cache if "--teacher_cache" not in more else []
        assert run(lambda: command.main([*argv, *given, *more])) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        return lines[0]

    assert "none at nowhere" in fails("--teacher_cache", "[nowhere]")
    assert "layer_ids: expected some of [2], after which" in fails("--teacher_cache", f"[{cached / 'other'}]")
    assert "expected schema 'draftsmith.features/1', found" in fails("--teacher_cache", f"[{cached / 'laws'}]")
    assert "target_sharded: expected false with teacher_cache" in fails("--target_sharded", "true")
    dispatch = "training.accelerator_config.dispatch_batches: expected false with teacher_cache"
    assert dispatch in fails("--training.accelerator_config", "{dispatch_batches: true}")
    assert not (tmp_path / "out" / "model.safetensors").exists()
    with listened() as heard:
        assert run(lambda: command.main(argv + cache)) == 0
    heard.require(
        "reading completions", "finding what is cached", "making the heads", "saving what was trained", trains=True
    )
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert torch.isfinite(load_file(tmp_path / "out" / "model.safetensors")["fc.weight"]).all()
