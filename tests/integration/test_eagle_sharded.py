"""EAGLE-3 heads under DeepSpeed ZeRO-3, in two real processes: what one process does, and whole heads.

As in `test_sharded`, which has every strategy: the same sums in float32, in another order, which is 1e-7 a step.
"""

from pathlib import Path

import pytest
import torch
from pipelines import LAST_BITS, furthest
from process_jobs import eagled
from processes import forked
from safetensors.torch import load_file

from draftsmith.medusa.eagle.heads import EagleHeads

pytestmark = pytest.mark.slow

STRATEGY, WRAPPER = "zero3", "DeepSpeedEngine"
METRICS = ("loss", "mean_acceptance_length", "alpha", "accuracy_1", "alpha_3")


def planned(pipeline: Path, processes: int) -> dict[str, dict]:
    steps = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1}
    split: dict = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2} if processes == 2 else {}
    return {
        "plain": {"heldout": [str(pipeline / "heldout")], "training": steps},
        "cut": {
            "draft_vocabulary": 40,
            "init": "random",
            "divergence": {"lk_hybrid": 1.0, "nla": 0.5},
            "training": {"max_steps": 3} | split,
        },
        "copied": {
            "norm_output": True,
            "target_sharded": processes == 2,
            "training": {"max_steps": 3, "activation_checkpointing": processes == 2} | split,
        },
    }


@pytest.fixture(scope="module")
def alone(pipeline, tmp_path_factory):
    output = tmp_path_factory.mktemp("alone")
    (found,) = forked(eagled, pipeline, output, planned(pipeline, 1), strategy="one")
    return found, output


@pytest.fixture(scope="module")
def together(pipeline, tmp_path_factory):
    output = tmp_path_factory.mktemp(STRATEGY)
    return forked(eagled, pipeline, output, planned(pipeline, 2), strategy=STRATEGY), output


def logged(run: dict, key: str) -> list[float]:
    return [entry[key] for entry in run["log"] if key in entry]


@pytest.mark.parametrize("name", ["plain", "cut", "copied"])
def test_two_processes_are_one(alone, together, name):
    """Losses, gradients, what is measured, and the heads that are saved, whole."""
    found, output = together
    one = alone[0][name]
    for rank in found:
        run = rank[name]
        assert (run["ran"]["num_processes"], run["ran"]["wrapper"]) == (2, WRAPPER)
        assert logged(run, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5)
        assert logged(run, "grad_norm") == pytest.approx(logged(one, "grad_norm"), rel=1e-4)
        for metric in METRICS if name == "plain" else ():
            assert logged(run, f"eval_{metric}") == pytest.approx(logged(one, f"eval_{metric}"), rel=1e-5)
    saved, expected = (load_file(path / name / "model.safetensors") for path in (output, alone[1]))
    assert furthest(
        {key: value.float() for key, value in expected.items()}, {k: v.float() for k, v in saved.items()}
    ) < (LAST_BITS)
    assert torch.equal(EagleHeads.from_pretrained(output / name).lm_head.weight, saved["lm_head.weight"])
