"""Distillation from a teacher cache: what it is without the target, and that it needs none."""

import shutil
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from accelerate.state import AcceleratorState
from listening import LOADING, listened
from pipelines import configured, furthest, history, measured_on_what_it_learns, weights

from draftsmith.decode.errors import InputError
from draftsmith.distill import __main__ as command
from draftsmith.train.cli import flags_of, run
from draftsmith.train.teacher import cache_reader, distribution_shards
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache


def completions(pipeline):
    return [str(pipeline / name) for name in ("short", "long", "heldout")]


TRAINING = {"max_steps": 6, "eval_on_start": True, "per_device_eval_batch_size": 2}


@pytest.fixture(scope="module")
def cached(pipeline, tmp_path_factory):
    """Caches of all and of 8 tokens; and the target as it is without its weights."""
    root = tmp_path_factory.mktemp("cached")
    for name, k in (("whole", 300), ("top", 8)):
        make_cache(CacheConfig(str(pipeline / "target"), completions(pipeline), str(root / name), k=k, temperature=0.8))
    shutil.copytree(pipeline / "target", root / "target")
    (root / "target" / "model.safetensors").unlink()
    return root


def distilled(pipeline, output, cached=None, name="whole", **options):
    options = {"temperature": 0.8, "draft_length": 3, "heldout": [str(pipeline / "heldout")]} | options
    options["training"] = TRAINING | options.get("training", {})
    if cached is not None:
        options |= {"target": str(cached / "target"), "teacher_cache": [str(cached / name)]}
    return command.distill(configured(pipeline, output, **options))


METRICS = ("alpha", "greedy_alpha", "agreement", "mean_acceptance_length", "loss")


@pytest.mark.parametrize(
    ("divergence", "precision"),
    [
        ("forward_kl", torch.float16),
        ("jsd", torch.float32),
        ({"tvd": 1.0, "reverse_kl": 0.1, "cross_entropy": 0.1}, torch.float32),
    ],
    ids=str,
)
def test_with_all_tokens_it_is_what_it_is_with_the_target(
    pipeline, cached, tmp_path, monkeypatch, divergence, precision
):
    """Completions of 3 and of 12 tokens, some of them cut. The 11 bits of log p on disk are all that differs."""
    tolerance = 1e-2
    if precision == torch.float32:
        tolerance = 1e-5
        columns = distribution_shards.COLUMNS
        wide = columns.set(columns.get_field_index("log_p"), pa.field("log_p", pa.list_(pa.float32())))
        for module in (distribution_shards, cache_reader):
            monkeypatch.setattr(module, "COLUMNS", wide)
        monkeypatch.setitem(distribution_shards.NUMBERS, "log_p", precision)
        make_cache(
            CacheConfig(str(pipeline / "target"), completions(pipeline), str(tmp_path / "wide"), 300, temperature=0.8)
        )
    options = {"divergence": divergence, "max_length": 16}
    live = distilled(pipeline, tmp_path / "live", **options)
    name = tmp_path / "wide" if precision == torch.float32 else "whole"
    from_cache = distilled(pipeline, tmp_path / "cached", cached, name, **options)
    losses = history(live, "loss")
    assert len(losses) == len(set(losses)) == 6
    assert history(from_cache, "loss") == pytest.approx(losses, rel=tolerance)
    assert history(from_cache, "grad_norm") == pytest.approx(history(live, "grad_norm"), rel=10 * tolerance)
    for metric in METRICS:
        assert history(from_cache, f"eval_{metric}") == pytest.approx(history(live, f"eval_{metric}"), rel=tolerance)
    if precision == torch.float32:  # Adam makes whole steps of gradients that are nothing but rounding
        assert furthest(weights(tmp_path / "cached"), weights(tmp_path / "live")) < 2e-5


def test_replay_is_exact_but_for_its_bounds(pipeline, cached, tmp_path):
    """Before the first step: τ and agreement need no tail, α is bounded from above, p(argmax q) from below."""
    options = {"training": {"max_steps": 1}}
    live = distilled(pipeline, tmp_path / "live", **options)
    from_cache = distilled(pipeline, tmp_path / "cached", cached, "top", **options)
    full, found = ({name: history(trainer, f"eval_{name}")[0] for name in METRICS} for trainer in (live, from_cache))
    assert found["mean_acceptance_length"] == pytest.approx(full["mean_acceptance_length"], rel=1e-5)
    assert found["agreement"] == full["agreement"]
    assert found["alpha"] > full["alpha"]
    assert found["greedy_alpha"] < full["greedy_alpha"]
    assert found["loss"] < full["loss"]


@pytest.mark.parametrize("divergence", ["skew_reverse_kl", "tvd"])
def test_every_divergence_is_learned_from_the_top(pipeline, cached, tmp_path, divergence):
    training = {"max_steps": 20, "logging_steps": 20}
    heldout = {"heldout": [str(pipeline / "short"), str(pipeline / "long")]}
    with measured_on_what_it_learns():
        trainer = distilled(
            pipeline, tmp_path / "out", cached, "top", divergence=divergence, training=training, **heldout
        )
    before, after = history(trainer, "eval_loss")
    assert after < 0.9 * before


def test_packed_rows_are_trained_on_from_a_cache_too(pipeline, cached, tmp_path):
    options = {"packing": True, "max_length": 60, "training": {"per_device_train_batch_size": 2, "max_steps": 4}}
    live = distilled(pipeline, tmp_path / "live", **options)
    from_cache = distilled(pipeline, tmp_path / "cached", cached, **options)
    assert len(from_cache.train_dataset) < 20
    assert history(from_cache, "loss") == pytest.approx(history(live, "loss"), rel=1e-2)


def test_the_split_of_a_batch_changes_nothing(pipeline, cached, tmp_path):
    whole = distilled(pipeline, tmp_path / "whole", cached, "top")
    training = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "dataloader_num_workers": 1}
    split = distilled(pipeline, tmp_path / "split", cached, "top", training=training)
    assert history(split, "loss") == pytest.approx(history(whole, "loss"), rel=1e-5)
    assert furthest(weights(tmp_path / "whole"), weights(tmp_path / "split")) < 1e-5


def test_under_deepspeed_the_laws_keep_their_bits(pipeline, cached, tmp_path, monkeypatch):
    """The Trainer casts floats of a batch to the engine's dtype there; seen by what it does to a batch."""
    trainer = distilled(pipeline, tmp_path / "out", cached, "top", training={"max_steps": 1})
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.is_deepspeed_enabled = True
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(dtype=lambda: torch.bfloat16))
    monkeypatch.setattr(AcceleratorState, "deepspeed_plugin", plugin)
    prepared = trainer._prepare_input(batch)
    assert trainer._prepare_input(torch.ones(1)).dtype == torch.bfloat16
    assert all(torch.equal(column, prepared["teacher"][name]) for name, column in batch["teacher"].items())


def test_what_does_not_fit_is_refused_in_one_line(pipeline, cached, tmp_path, capsys):
    training = {"output_dir": tmp_path / "out", "max_steps": 1, "use_cpu": "true", "report_to": "none"}
    argv = ["--target", str(cached / "target"), "--draft", str(pipeline / "draft"), "--temperature", "0.8"]
    argv += ["--completions", f"[{pipeline / 'short'}]", "--teacher_cache", f"[{cached / 'top'}]"]
    argv += flags_of({f"training.{name}": value for name, value in training.items()})

    refused = {
        "temperature: expected 0.8, which": ("--temperature", "1"),
        "top_k: expected 0, which": ("--top_k", "5"),
        "none at nowhere": ("--teacher_cache", "[nowhere]"),
        "training.accelerator_config.dispatch_batches: expected false with teacher_cache": (
            "--training.accelerator_config",
            "{dispatch_batches: true}",
        ),
    }
    for line, more in refused.items():
        capsys.readouterr()
        assert run(lambda more=more: command.main([*argv, *more])) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert line in said
    assert not (tmp_path / "out" / "model.safetensors").exists()
    with listened() as heard:
        assert run(lambda: command.main(argv)) == 0
    heard.require("reading completions", "finding what is cached", "making the draft", *LOADING, trains=True)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_without_a_cache_the_weights_are_needed(pipeline, cached, tmp_path):
    with pytest.raises(InputError, match="target: expected a causal LM"):
        command.distill(configured(pipeline, tmp_path / "out", target=str(cached / "target")))
