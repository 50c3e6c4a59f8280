"""How long costs may take, and why they are of eager forwards."""

import json
import weakref
from contextlib import contextmanager

import pytest
import torch

from draftsmith.decode.cache import program
from draftsmith.decode.measurement.costs import CostTable, DraftCosts
from draftsmith.scripts.choose import rounds
from draftsmith.scripts.choose.config import ChooseConfig
from draftsmith.train.cli import OutOfTime

TABLE = CostTable(
    context=50, temperature=0.0, target_seconds={1: {1: 1.0, 2: 1.2}}, plain_overhead_seconds={1: 0.0}, prompt=20,
    prefill_seconds={1: 2.0}, drafters={"it": {1: DraftCosts(0.0, 0.2, 0.0, 0.0)}},
)  # fmt: skip
CHOSEN = "a short timing chose them: float32 1.0, float32 compiled 1.2"


@pytest.mark.parametrize(
    ("compiled", "compiling", "first", "limits", "eager"),
    [
        (None, None, "compiled", [50.0], None),
        (None, None, "eager", [50.0], CHOSEN),
        (None, 240.0, "eager", [50.0], f"compiling takes about 4:00, for which there is no time; {CHOSEN}"),
        (None, 240.0, program.NotCompiled, [50.0, 100.0],
         "compiling takes about 4:00, for which there is no time"),
        (None, None, OutOfTime, [50.0, 100.0],
         "compiled ones were not measured within 0:50, half of the time that was left"),
        (False, None, "eager", [100.0], None),
        (True, None, "compiled", [100.0], None),
    ],
)  # fmt: skip
def test_one_attempt_has_all_of_the_time_and_two_share_it(
    tmp_path, monkeypatch, compiled, compiling, first, limits, eager
):
    config = ChooseConfig(
        target="t", prompts="p", output="o", budget="1h", compiled=compiled, draft_length=[1], temperature=[0.0]
    )
    said, pairs = [], []

    @contextmanager
    def interrupt_after(most):
        said.append(most)
        yield

    def measured(config, drafters, heldout, compiled, seconds):
        assert not [pair for pair in pairs if pair() is not None]  # the first pair is gone when the second comes
        pair = torch.nn.Linear(1, 1)
        pairs.append(weakref.ref(pair))
        if compiled is not False and isinstance(first, type):
            raise first
        return {
            "schema": "draftsmith.choose_costs/1", "target": "t", "environment": {}, "compiled": first == "compiled",
            "eager": CHOSEN, "tables": [TABLE],
        }  # fmt: skip

    monkeypatch.setattr(rounds, "interrupt_after", interrupt_after)
    monkeypatch.setattr(rounds, "_measured", measured)
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: 5.0)
    path = tmp_path / "costs.json"
    tables = rounds.kept_costs(config, {"it": "dir"}, {}, path, compiling, 1.0, 100.0)
    assert tables.keys() == {"0"} and said == limits
    assert json.loads(path.read_text())["eager"] == eager
