"""MTP layers in two real processes, under FSDP2 and ZeRO-3: what one process does, and whole layers."""

import pytest
from pipelines import LAST_BITS, furthest
from process_jobs import taught_mtp
from processes import forked
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

RUNS = {"one layer": {}, "a step for each layer": {"num_layers": 2, "divergence": "cross_entropy"}}


def planned(processes: int) -> dict[str, dict]:
    split: dict = {"per_device_train_batch_size": 2} if processes == 2 else {}
    options = {"training": {"max_steps": 3} | split, "target_sharded": processes == 2}
    return {name: options | run for name, run in RUNS.items()}


@pytest.fixture(scope="module")
def alone(pipeline, tmp_path_factory):
    output = tmp_path_factory.mktemp("alone")
    (found,) = forked(taught_mtp, pipeline, output, planned(1), strategy="one")
    return found, output


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_two_processes_are_one(pipeline, alone, tmp_path, strategy):
    for rank in forked(taught_mtp, pipeline, tmp_path, planned(2), strategy=strategy):
        for name in RUNS:
            one, run = alone[0][name], rank[name]
            for metric, close in (("loss", 1e-5), ("grad_norm", 1e-4)):
                expected, found = ([entry[metric] for entry in log["log"] if metric in entry] for log in (one, run))
                assert found == pytest.approx(expected, rel=close)
    for name in RUNS:
        saved, expected = (load_file(path / name / "model.safetensors") for path in (tmp_path, alone[1]))
        assert furthest(*({key: part.float() for key, part in of.items()} for of in (saved, expected))) < LAST_BITS
