"""Speed, shares of time and arithmetic, on a clock that the test moves."""

import time

import pytest
import torch
from conftest import tiny_llama
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM, TrainerState, TrainingArguments

from draftsmith.train.job.flops import DEVICES, Work, known_device
from draftsmith.train.job.telemetry import Stopwatch, Telemetry


@pytest.fixture
def clock(monkeypatch):
    """Seconds, that pass when the test says so."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def test_phases_add_up_to_all_of_the_time(clock):
    watch = Stopwatch(torch.device("cpu"))
    clock(1)
    with watch.phase("draft"):
        clock(2)
        with watch.phase("teacher"):
            clock(4)
        clock(8)
    with watch.phase("evaluation"):
        clock(16)
        with watch.phase("teacher"):  # of the evaluation, and no step's
            clock(32)
    clock(64)
    with watch.phase("data"):
        assert watch.taken() == {"rest": 64, "draft": 2 + 8, "teacher": 4, "evaluation": 16 + 32}
        clock(128)
    assert watch.taken() == {"data": 128}


class Queue:
    """Stands in for a GPU: events are passed when it has got so far."""

    def __init__(self) -> None:
        self.made: list[Queue.Event] = []
        self.passed = 0

    class Event:
        def __init__(self, queue: "Queue") -> None:
            self.queue, self.place = queue, len(queue.made)
            queue.made.append(self)

        def record(self) -> None:
            pass

        def query(self) -> bool:
            return self.place < self.queue.passed

        def elapsed_time(self, end: "Queue.Event") -> float:
            assert end.query()  # of an event that is not passed CUDA raises
            return 1000.0 * (end.place - self.place)


def test_nothing_waits_for_a_gpu(monkeypatch):
    queue = Queue()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Queue.Event(queue))
    watch = Stopwatch(torch.device("cuda"))
    for _ in range(2):
        with watch.phase("draft"), watch.phase("loss"):
            pass
    assert len(queue.made) == 8 and watch.taken() == {}
    queue.passed = 4
    assert watch.taken() == {"draft": 2, "loss": 1}
    queue.passed = 8
    assert watch.taken() == {"rest": 1, "draft": 2, "loss": 1}


def test_figures_are_those_of_all_processes(clock, tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    asked = []
    telemetry = Telemetry(args, lambda *counts: asked.append(counts))
    batch = {"labels": torch.zeros(3, 5)}
    packed = {"labels": torch.zeros(1, 5), "position_ids": torch.tensor([[0, 1, 0, 1, 2]])}
    with telemetry.clock.phase("teacher"):
        clock(3)
    with telemetry.clock.phase("evaluation"):
        clock(50)
    telemetry.count([batch, packed], torch.tensor(9))
    clock(2)
    with telemetry.clock.phase("data"):
        pass
    found = telemetry.entries(TrainerState(global_step=1, max_steps=7201))
    assert (found["tokens_per_second"], found["samples_per_second"]) == (9 / 5, 4 / 5)
    assert (found["time_teacher"], found["time_rest"], found["time_draft"]) == (3 / 5, 2 / 5, 0)
    assert found["hours_left"] == 2 * 7200 / 3600
    assert asked == [(20, 3 * 15 + 3 + 6, 9.0)]
    clock(1)
    with telemetry.clock.phase("data"):
        pass
    assert telemetry.entries(TrainerState(global_step=2, max_steps=7201))["tokens_per_second"] == 0


@pytest.mark.parametrize("trained", [True, False])
def test_the_work_is_what_torch_counts(trained):
    """The weights' part to the last operation; of attention the whole square, beside a little for positions."""
    model = tiny_llama(layers=3, hidden=64).train().requires_grad_(trained)
    model.set_attn_implementation("eager")
    model.get_input_embeddings().requires_grad_(True)
    work = Work.of(model)
    rows, length = 2, 32
    ids = torch.zeros(rows, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counted:
        logits = model(input_ids=ids, use_cache=False).logits
    flops = {str(op): value for op, value in counted.get_flop_counts()["Global"].items()}
    positions = rows * length
    matrices = work.forward(positions, 0, positions)
    assert matrices == flops["aten.mm"]
    assert work.forward(0, rows * length**2, 0) == pytest.approx(flops["aten.bmm"], rel=0.01)
    with FlopCounterMode(display=False) as counted:
        logits.sum().backward()
    backward = {str(op): value for op, value in counted.get_flop_counts()["Global"].items()}["aten.mm"]
    assert work.step(positions, 0, positions) == matrices + backward == (3 if trained else 2) * matrices


def test_experts_are_not_counted_and_heads_are_linear_maps():
    small = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = MixtralConfig(**small, num_attention_heads=2, num_key_value_heads=2, num_local_experts=2)
    assert Work.of(MixtralForCausalLM(config)) is None
    assert Work.of_maps(nn.Sequential(nn.Linear(3, 5), nn.SiLU(), nn.Linear(5, 7))).head == 15 + 35


def test_a_device_is_known_by_its_name():
    assert known_device("NVIDIA H100 80GB HBM3") is DEVICES["H100"]
    assert known_device("NVIDIA H100 PCIe") is DEVICES["H100 PCIe"]
    assert known_device("NVIDIA A10G") is DEVICES["A10G"] and known_device("NVIDIA A100-SXM4-80GB") is DEVICES["A100"]
    assert known_device("NVIDIA L40S") is DEVICES["L40S"] and known_device("NVIDIA L4") is DEVICES["L4"]
    assert known_device("") is None
