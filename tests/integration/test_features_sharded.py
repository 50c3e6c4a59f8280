"""Drafters on features in two real processes: what one process does, and whole drafters, for each kind and strategy.

As in `test_sharded`, which has every strategy: the same sums in float32, in another order, which is 1e-7 a step.
"""

from pathlib import Path

import pytest
from pipelines import LAST_BITS, furthest
from process_jobs import blocked, eagled, taught_mtp
from processes import forked
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

METRICS = ("loss", "mean_acceptance_length", "alpha", "accuracy_1", "alpha_3")
SPLIT = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
RUNS = {
    "eagle": {
        "cut": {"draft_vocabulary": 40, "init": "random", "divergence": {"lk_hybrid": 1.0, "nla": 0.5}},
        "copied": {"norm_output": True, "target_sharded": True, "training": {"activation_checkpointing": True}},
    },
    "block": {
        "everything": {
            "draft_vocabulary": 40, "init": "random", "layers": 2, "divergence": {"cross_entropy": 0.1, "tvd": 1.8},
            "confidence": 1.0, "dpace": 0.5, "training": {"activation_checkpointing": True},
        },
        "chosen": {"markov_rank": 0, "selector_rank": 4, "anchor_guesses": False, "block_size": 4},
        "recurrent": {"markov_rank": 0, "domino_rank": 4},
    },
    "mtp": {
        "one layer": {"target_sharded": True},
        "a step for each layer": {"num_layers": 2, "divergence": "cross_entropy"},
    },
}  # fmt: skip
"""The runs of each kind, in addition to a plain one that is evaluated."""
TRAIN = {"eagle": eagled, "block": blocked, "mtp": taught_mtp}
WRAPPERS = {"ddp": "DistributedDataParallel", "fsdp2": "FSDP", "zero3": "DeepSpeedEngine"}


def planned(pipeline: Path, kind: str, processes: int) -> dict[str, dict]:
    """The runs of a kind: in one process without sharding and checkpointing, in two with another split of a batch."""
    steps = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1}
    runs = {"plain": {"heldout": [str(pipeline / "heldout")], "training": steps}}
    for name, options in RUNS[kind].items():
        own = options.get("training", {}) | SPLIT if processes == 2 else {}
        runs[name] = options | {"training": {"max_steps": 3} | own}
        runs[name] |= {"target_sharded": processes == 2} if "target_sharded" in options else {}
    return runs


@pytest.fixture(scope="module")
def alone(request, pipeline, tmp_path_factory):
    output = tmp_path_factory.mktemp("alone")
    (found,) = forked(TRAIN[request.param], pipeline, output, planned(pipeline, request.param, 1), strategy="one")
    return request.param, found, output


def logged(run: dict, key: str) -> list[float]:
    return [entry[key] for entry in run["log"] if key in entry]


@pytest.mark.parametrize(
    ("alone", "strategy"),
    [("block", "ddp"), ("block", "fsdp2"), ("block", "zero3"), ("eagle", "zero3"), ("mtp", "fsdp2")],
    indirect=["alone"],
)
def test_two_processes_are_one(pipeline, alone, tmp_path, strategy):
    """Losses, gradients, what is measured, and the drafters that are saved, whole."""
    kind, references, output = alone
    for rank in forked(TRAIN[kind], pipeline, tmp_path, planned(pipeline, kind, 2), strategy=strategy):
        for name, reference in references.items():
            run = rank[name]
            assert run["ran"]["num_processes"] == 2 and run["ran"]["wrapper"].startswith(WRAPPERS[strategy])
            assert logged(run, "loss") == pytest.approx(logged(reference, "loss"), rel=1e-5)
            assert logged(run, "grad_norm") == pytest.approx(logged(reference, "grad_norm"), rel=1e-4)
            for metric in METRICS if name == "plain" else ():
                assert logged(run, f"eval_{metric}") == pytest.approx(logged(reference, f"eval_{metric}"), rel=1e-5)
    for name in references:
        saved, expected = (load_file(path / name / "model.safetensors") for path in (tmp_path, output))
        one, two = ({key: tensor.float() for key, tensor in each.items()} for each in (expected, saved))
        assert furthest(one, two) < 4 * LAST_BITS  # Muon makes more of them without vector instructions
