"""Parallel drafts in two processes that share their weights: the losses, figures and weights of one, and its resume."""

import pytest
from pipelines import LAST_BITS, furthest, weights
from process_jobs import distilled
from processes import forked

pytestmark = pytest.mark.slow

STEPS, CHECKPOINT = 8, 6  # of 4 samples out of 20: the second epoch begins at step 6
FIGURES = ("loss", "alpha", "alpha_1", "alpha_2", "mean_acceptance_length", "plain_mean_acceptance_length")


def run(pipeline, **options) -> dict:
    training = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": CHECKPOINT}
    training |= {"eval_strategy": "steps", "eval_steps": 4, "dataloader_drop_last": True}  # two processes fill up rows
    options = {"parallel": 3, "heldout": [str(pipeline / "heldout")], "training": training} | options
    packed = {"packing": True, "max_length": 48, "divergence": "lk_hybrid"}
    return options | packed if options.pop("packed", False) else options


def logged(found: dict, key: str) -> list[float]:
    return [entry[key] for entry in found["log"] if key in entry]


@pytest.fixture(scope="module")
def alone(pipeline, tmp_path_factory):
    output = tmp_path_factory.mktemp("alone")
    runs = {"run": run(pipeline), "packed": run(pipeline, packed=True)}
    (found,) = forked(distilled, pipeline, output, runs, strategy="one")
    return found, output


def test_two_processes_are_one(pipeline, alone, tmp_path):
    runs = {"run": run(pipeline), "packed": run(pipeline, packed=True)}
    ranks = forked(distilled, pipeline, tmp_path, runs, strategy="fsdp2")
    for name in runs:
        one, two = alone[0][name], ranks[0][name]
        assert two["ran"]["num_processes"] == 2
        assert len(logged(one, "loss")) == STEPS
        assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5)
        for figure in FIGURES:
            expected = logged(one, f"eval_{figure}")
            assert len(expected) == 2 and logged(two, f"eval_{figure}") == pytest.approx(expected, rel=1e-4)
        assert furthest(weights(tmp_path / name), weights(alone[1] / name)) < LAST_BITS


def test_a_resumed_run_draws_the_same_masks(pipeline, alone, tmp_path):
    """In the second epoch; to the last bit, for what differs by a mask differs by far more."""
    resumes = str(alone[1] / "run" / f"checkpoint-{CHECKPOINT}")
    (found,) = forked(distilled, pipeline, tmp_path, {"run": run(pipeline) | {"resumes": resumes}}, strategy="one")
    assert logged(found["run"], "loss") == logged(alone[0]["run"], "loss")
    assert furthest(weights(tmp_path / "run"), weights(alone[1] / "run")) == 0.0
