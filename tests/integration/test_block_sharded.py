"""Block drafters in two real processes, as replicas and under ZeRO-3: what one process does, and whole drafters.

As in `test_sharded`, which has every strategy: the same sums in float32, in another order, which is 1e-7 a step.
"""

from pathlib import Path

import pytest
from pipelines import LAST_BITS, furthest
from process_jobs import blocked
from processes import forked
from safetensors.torch import load_file

from draftsmith.medusa.block.model import BlockDrafter

pytestmark = pytest.mark.slow

WRAPPERS = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPBlockDrafter", "zero3": "DeepSpeedEngine"}
METRICS = ("loss", "mean_acceptance_length", "alpha", "accuracy_1", "alpha_3")


def planned(pipeline: Path, processes: int) -> dict[str, dict]:
    steps = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1}
    split: dict = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2} if processes == 2 else {}
    return {
        "plain": {"heldout": [str(pipeline / "heldout")], "training": steps},
        "everything": {
            "draft_vocabulary": 40,
            "init": "random",
            "layers": 2,
            "divergence": {"cross_entropy": 0.1, "tvd": 1.8},
            "confidence": 1.0,
            "dpace": 0.5,
            "training": {"max_steps": 3, "activation_checkpointing": processes == 2} | split,
        },
        "chosen": {
            **{"markov_rank": 0, "selector_rank": 4, "anchor_guesses": False, "block_size": 4},
            "training": {"max_steps": 3},
        },
        "recurrent": {"markov_rank": 0, "domino_rank": 4, "training": {"max_steps": 3}},
    }


@pytest.fixture(scope="module")
def alone(pipeline, tmp_path_factory):
    output = tmp_path_factory.mktemp("alone")
    (found,) = forked(blocked, pipeline, output, planned(pipeline, 1), strategy="one")
    return found, output


@pytest.fixture(scope="module", params=WRAPPERS)
def together(request, pipeline, tmp_path_factory):
    output = tmp_path_factory.mktemp(request.param)
    return request.param, forked(blocked, pipeline, output, planned(pipeline, 2), strategy=request.param), output


def logged(run: dict, key: str) -> list[float]:
    return [entry[key] for entry in run["log"] if key in entry]


@pytest.mark.parametrize("name", ["plain", "everything", "chosen", "recurrent"])
def test_two_processes_are_one(alone, together, name):
    """Losses, gradients, what is measured, and the drafters that are saved, whole."""
    strategy, found, output = together
    reference = alone[0][name]
    for rank in found:
        run = rank[name]
        assert (run["ran"]["num_processes"], run["ran"]["wrapper"]) == (2, WRAPPERS[strategy])
        assert logged(run, "loss") == pytest.approx(logged(reference, "loss"), rel=1e-5)
        assert logged(run, "grad_norm") == pytest.approx(logged(reference, "grad_norm"), rel=1e-4)
        for metric in METRICS if name == "plain" else ():
            assert logged(run, f"eval_{metric}") == pytest.approx(logged(reference, f"eval_{metric}"), rel=1e-5)
    saved, expected = (load_file(path / name / "model.safetensors") for path in (output, alone[1]))
    assert saved.keys() == expected.keys()
    one, two = ({name: tensor.float() for name, tensor in each.items()} for each in (expected, saved))
    assert furthest(one, two) < 4 * LAST_BITS  # Muon makes more of them without vector instructions
    BlockDrafter.from_pretrained(output / name)
