"""Medusa heads under DDP, FSDP2 and DeepSpeed ZeRO, in two real processes: what one process does, and whole heads.

As in `test_sharded`, which has every strategy: the same sums in float32, in another order, which is 1e-7 a step.
"""

import json
from pathlib import Path

import pytest
import torch
from pipelines import LAST_BITS, furthest, weights
from process_jobs import head_logits, headed
from processes import forked, launch_environment, shipped
from safetensors.torch import load_file

from draftsmith.medusa import MedusaHeads
from draftsmith.train.options import LoraOptions

pytestmark = pytest.mark.slow

WRAPPERS = {
    "ddp": ("MULTI_CPU", "DistributedDataParallel", "Parameter", None, False),
    "fsdp2": ("FSDP", "FSDPMedusaHeads", "DTensor", None, False),
    "zero3": ("DEEPSPEED", "DeepSpeedEngine", "Parameter", 3, True),
}
METRICS = ("loss", "mean_acceptance_length", "alpha", "accuracy_1", "alpha_3")


def planned(pipeline: Path, processes: int) -> dict[str, dict]:
    """The runs that are compared: of two processes, or of one."""
    steps = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    # α falls or rises from the first step on: an early checkpoint has to be found again.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "alpha", "greater_is_better": False}
    shared = {"lm_heads": "shared", "num_layers": 2, "draft_vocabulary": 40, "divergence": "jsd"}
    split: dict = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2} if processes == 2 else {}
    return {
        "hydra": {"hydra": True, "heldout": [str(pipeline / "heldout")], "training": steps | best},
        "shared": shared | {"target_sharded": processes == 2, "training": {"max_steps": 3} | split},
    }


def planned_joint(pipeline: Path, strategy: str) -> dict[str, dict]:
    """Medusa-2, its first step a warm-up of the heads, which DeepSpeed cannot do."""
    steps = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "weight_decay": 0.1}
    steps |= {"save_strategy": "steps", "save_steps": 2}
    options = {"heldout": [str(pipeline / "heldout")], "training": steps}
    runs = {
        "lora": {"backbone": "lora", "lora": LoraOptions(r=4), "warmup_heads": 0.3, **options},
        "full": {"backbone": "full", "warmup_heads": 0.3, **options},
        "cold": {"backbone": "full", **options},
    }
    runs["adapters"] = runs["lora"] | {"warmup_heads": 0.0}
    names = {"one": tuple(runs), "zero3": ("cold", "adapters")}.get(strategy, ("lora", "full"))
    return {name: runs[name] for name in names}


@pytest.fixture(scope="module")
def alone(pipeline, tmp_path_factory):
    output = tmp_path_factory.mktemp("alone")
    (found,) = forked(headed, pipeline, output, planned(pipeline, 1) | planned_joint(pipeline, "one"), strategy="one")
    return found, output


@pytest.fixture(scope="module", params=["ddp"])
def together(request, pipeline, tmp_path_factory):
    output = tmp_path_factory.mktemp(request.param)
    return request.param, forked(headed, pipeline, output, planned(pipeline, 2), strategy=request.param), output


@pytest.fixture(scope="module", params=["fsdp2", "zero3"])
def joined(request, pipeline, tmp_path_factory):
    output = tmp_path_factory.mktemp(f"joint-{request.param}")
    runs = planned_joint(pipeline, request.param)
    return request.param, forked(headed, pipeline, output, runs, strategy=request.param), output


def logged(run: dict, key: str) -> list[float]:
    return [entry[key] for entry in run["log"] if key in entry]


def assert_same_run(one: dict, ranks: list[dict]) -> None:
    """Losses and gradients of one process, on every rank."""
    assert len(set(logged(one, "loss"))) == 3
    for rank in ranks:
        assert logged(rank, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5)
        assert logged(rank, "grad_norm") == pytest.approx(logged(one, "grad_norm"), rel=1e-4)


def assert_same_metrics(one: dict, ranks: list[dict]) -> None:
    for name in METRICS:
        expected = logged(one, f"eval_{name}")
        assert len(expected) == 3
        for rank in ranks:
            assert logged(rank, f"eval_{name}") == pytest.approx(expected, rel=1e-5)


def assert_same_heads(one: Path, two: Path, ranks: list[dict]) -> None:
    """Whole heads in an ordinary directory: those of one process, and, read by pytest's, those that were trained."""
    found = load_file(two / "model.safetensors")
    assert furthest(load_file(one / "model.safetensors"), found) < LAST_BITS
    assert all(tensor.numel() for tensor in found.values())
    assert not list(two.glob(".*partial")) and not list(two.glob("pytorch_model*"))
    logits = head_logits(two)
    assert logits[logits.isfinite()].std() > 0.01  # no empty tensors; heads of a random target begin quiet
    for rank in ranks:
        torch.testing.assert_close(rank["logits"], logits, atol=1e-6, rtol=1e-6)


def test_each_rank_ran_as_it_was_asked_to(together):
    strategy, found, _ = together
    kind, wrapper, parameter, stage, partitioned = WRAPPERS[strategy]
    for rank in found:
        for run in rank.values():
            ran = run["ran"]
            assert (ran["num_processes"], ran["backend"], ran["device"]) == (2, "gloo", "cpu")
            assert (ran["distributed_type"], ran["parameter"], ran["wrapper"]) == (kind, parameter, wrapper)
            assert (ran["stage"], ran["partitioned"]) == (stage, partitioned)


def test_losses_metrics_and_heads_are_those_of_one_process(alone, together):
    """Completions of 3 to 12 tokens; five held-out samples, of which the sixth, that fills a batch, must not count."""
    _, found, output = together
    ranks = [rank["hydra"] for rank in found]
    assert_same_run(alone[0]["hydra"], ranks)
    assert_same_metrics(alone[0]["hydra"], ranks)
    assert_same_heads(alone[1] / "hydra", output / "hydra", ranks)
    assert json.loads((output / "hydra" / "draftsmith.json").read_text())["config"]["hydra"] is True


def test_the_best_checkpoint_is_loaded_on_every_rank(together):
    _, found, output = together
    alphas = logged(found[0]["hydra"], "eval_alpha")
    worst = alphas.index(min(alphas)) + 1
    assert worst < 3
    kept = output / "hydra" / f"checkpoint-{worst}"
    assert furthest(load_file(output / "hydra" / "model.safetensors"), load_file(kept / "model.safetensors")) == 0
    for rank in found:
        assert rank["hydra"]["best"] == str(kept)


def test_a_shared_head_accumulation_and_a_sharded_target_change_nothing(alone, together):
    _, found, output = together
    ranks = [rank["shared"] for rank in found]
    assert_same_run(alone[0]["shared"], ranks)
    assert_same_heads(alone[1] / "shared", output / "shared", ranks)
    one, two = (MedusaHeads.from_pretrained(path / "shared") for path in (alone[1], output))
    assert torch.equal(one.token_map, two.token_map) and len(two.token_map) == 40


def test_a_backbone_is_trained_as_in_one_process_and_saved_whole(pipeline, alone, joined):
    strategy, found, output = joined
    kind, wrapper, parameter, *_ = WRAPPERS[strategy]
    for name in found[0]:
        ranks = [rank[name] for rank in found]
        for rank in ranks:
            ran = rank["ran"]
            assert (ran["num_processes"], ran["distributed_type"], ran["parameter"]) == (2, kind, parameter)
            assert ran["wrapper"] == wrapper.replace("MedusaHeads", "Joint")
        assert_same_run(alone[0][name], ranks)
        assert_same_metrics(alone[0][name], ranks)
        assert_same_heads(alone[1] / name, output / name, ranks)
        trained = weights(output / name / "backbone")
        assert furthest(trained, weights(alone[1] / name / "backbone")) < LAST_BITS
        assert furthest(trained, weights(pipeline / "target")) > 1e-4
        assert (output / name / "backbone" / "tokenizer.json").is_file()


def test_adapters_are_trained_in_float32_on_a_backbone_in_half_precision(pipeline, alone, tmp_path):
    options = planned_joint(pipeline, "one")["adapters"] | {"target_dtype": "bfloat16", "save_dtype": "bfloat16"}
    found = forked(headed, pipeline, tmp_path, {"run": options}, strategy="fsdp2")
    kept = load_file(tmp_path / "run" / "checkpoint-2" / "model.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32} and any("lora_" in name for name in kept)
    saved = load_file(tmp_path / "run" / "backbone" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    for rank in found:  # three significant digits, of all weights but the heads' and the adapters'
        assert logged(rank["run"], "loss") == pytest.approx(logged(alone[0]["adapters"], "loss"), rel=0.02)


@pytest.mark.parametrize("strategy", ["zero2"])
def test_a_backbone_is_trained_under_the_launchers_that_ship(pipeline, alone, tmp_path, strategy):
    """Their sizes are "auto": the backbone's config says how many."""
    launch, options = launch_environment(*shipped(strategy)), planned_joint(pipeline, "one")["adapters"]
    found = forked(headed, pipeline, tmp_path, {"run": options}, True, strategy=strategy, launch=launch)
    for rank in found:
        assert (rank["run"]["ran"]["stage"], rank["run"]["ran"]["num_processes"]) == (int(strategy[-1]), 2)
    assert_same_run(alone[0]["adapters"], [rank["run"] for rank in found])


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("zero2", {"backbone": "lora", "warmup_heads": 0.5}, "warmup_heads: expected 0 under DeepSpeed"),
        ("ddp", {"hydra": True, "target_sharded": True}, "target_sharded: expected false for Hydra heads"),
    ],
)
def test_what_cannot_be_sharded_is_refused(pipeline, tmp_path, strategy, options, message):
    with pytest.raises(AssertionError, match=f"InputError: {message}"):
        forked(headed, pipeline, tmp_path, {"run": options}, strategy=strategy)


def test_joint_training_is_resumed_as_if_it_had_not_stopped(pipeline, joined):
    strategy, found, output = joined
    name, options = next(iter(planned_joint(pipeline, strategy).items()))
    checkpoint = output / name / "checkpoint-2"
    kept = load_file(checkpoint / "model.safetensors")
    of_backbone = [key for key in kept if not key.startswith("heads.")]
    assert of_backbone and all(("lora_" in key) == (name == "lora") for key in of_backbone)
    runs = {f"{name}-resumed": options | {"resumes": str(checkpoint)}}
    resumed = forked(headed, pipeline, output, runs, strategy=strategy)
    for whole, rest in zip(found, resumed, strict=True):
        assert logged(rest[f"{name}-resumed"], "loss") == logged(whole[name], "loss")
        assert torch.equal(rest[f"{name}-resumed"]["logits"], whole[name]["logits"])
    one, two = (weights(output / run / "backbone") for run in (name, f"{name}-resumed"))
    assert furthest(one, two) == 0
