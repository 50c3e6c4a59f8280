"""What is kept and told of a run's steps: the first loss, checkpoints, telemetry."""

import copy
import math
import time

import pytest
import torch
from accelerate import Accelerator
from conftest import tiny_llama
from families import tiny_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM, TrainerState, TrainingArguments

from draftsmith.decode.errors import InputError
from draftsmith.train.job import optimizer
from draftsmith.train.job.checkpointed import CheckpointedTrainer, to_model_names
from draftsmith.train.job.flops import DEVICES, Work, known_speed
from draftsmith.train.job.kept_step import KeptStep
from draftsmith.train.job.optimizer import Muon, orthogonal
from draftsmith.train.job.step_checks import FirstLoss
from draftsmith.train.job.telemetry import Stopwatch, Telemetry
from draftsmith.train.lora import add_lora
from draftsmith.train.losses.chunked import chunked_objective
from draftsmith.train.losses.distributions import LiveDistributions
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead
from draftsmith.train.options import LoraOptions


def neox():
    return tiny_model("gpt-neox", tie_word_embeddings=False)


def adapted():
    model = neox()
    add_lora(model, LoraOptions(r=2))
    return model


def mixtral():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    torch.manual_seed(0)
    # Twelve experts: sorted as text, the tenth would be stacked behind the first.
    return MixtralForCausalLM(MixtralConfig(vocab_size=50, intermediate_size=8, num_local_experts=12, **sizes))


def llama():
    return tiny_model("llama")


@pytest.mark.parametrize(("make", "renamed"), [(neox, True), (adapted, True), (mixtral, True), (llama, False)])
def test_what_is_resumed_and_the_best_are_the_checkpoints(tmp_path, make, renamed):
    model = make()
    trainer = CheckpointedTrainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoint = tmp_path / "checkpoint-1"
    model.save_pretrained(checkpoint, state_dict=model.state_dict())
    saved = load_file(checkpoint / "model.safetensors")
    assert bool(saved.keys() - wanted.keys()) == renamed
    assert to_model_names(model, saved).keys() <= wanted.keys()
    trainer.state.best_model_checkpoint = str(checkpoint)
    for load in (lambda: trainer._load_from_checkpoint(str(checkpoint)), trainer._load_best_model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load()
        found = model.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_checkpoint_without_the_head_is_refused(tmp_path):
    model = neox()
    trainer = CheckpointedTrainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    checkpoint = tmp_path / "checkpoint-1"
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("lm_head")}
    model.save_pretrained(checkpoint, state_dict=state)
    with pytest.raises(
        InputError, match=r"checkpoint-1: expected .*weights of another model: none for lm_head\.weight"
    ):
        trainer._load_from_checkpoint(str(checkpoint))


ROWS, WIDTH, VOCABULARY = 6, 5, 11


def first_loss(scale: float, name: str) -> tuple[FirstLoss, list[float]]:
    """What a head with weights of this size begins with, in two parts; and the losses of both."""
    torch.manual_seed(0)
    first, losses = FirstLoss(), []
    for _ in range(2):
        head = OutputHead((scale * torch.randn(VOCABULARY, WIDTH)).requires_grad_(True))
        hidden, labels = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randint(VOCABULARY, (ROWS,))
        teacher = LiveDistributions(torch.randn(ROWS, WIDTH), OutputHead(torch.randn(VOCABULARY, WIDTH)))

        def loss_of(learners, labels=labels, teacher=teacher):
            ((hidden, head),) = learners
            return chunked_objective(Objective({name: 1.0}), hidden, head, teacher, labels)

        loss = first.beside_uniform(loss_of, [(hidden, head)])
        loss.backward()
        assert hidden.grad is not None and hidden.grad.abs().sum() > 0
        losses.append(loss.item())
    return first, losses


def test_a_loss_above_the_uniform_one_is_told_with_both(capsys):
    first, losses = first_loss(30.0, "cross_entropy")
    first.tell(Accelerator(cpu=True), 2 * ROWS, "the cause")
    said = capsys.readouterr().err
    assert f"the first loss is {sum(losses) / 2 / ROWS:.2f}, where {math.log(VOCABULARY):.2f} is that of" in said
    assert f"all {VOCABULARY} tokens" in said and said.strip().endswith("the cause") and said.count("\n") == 1


@pytest.mark.parametrize("name", ["cross_entropy", "forward_kl", "reverse_kl", "tvd"])
def test_weights_near_zero_are_no_worse_than_uniform(name, capsys):
    first_loss(1e-2, name)[0].tell(Accelerator(cpu=True), 2 * ROWS, "the cause")
    assert capsys.readouterr().err == ""


def test_a_run_that_goes_on_says_nothing(capsys):
    FirstLoss().tell(Accelerator(cpu=True), 1, "the cause")
    assert capsys.readouterr().err == ""


def test_a_step_before_training_that_is_better_is_named():
    log = [{"step": step, "eval_alpha": alpha} for step, alpha in ((0, 0.75), (4, 0.5), (8, 0.25))]
    kept = KeptStep.of(4, 8, "alpha", True, log)
    assert str(kept) == "step 4 of 8: alpha 0.500 on held-out text; the best that was measured, step 0, had 0.750"
    assert KeptStep.of(8, 8, "alpha", False, log).best_step == 8


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


def test_layers_with_states_have_maps_and_convolutions_but_no_pairs_of_positions():
    """Their convolutions' weights have three axes, as experts have."""
    model = tiny_model("qwen3-5")
    states, attention = model.model.layers
    weights = [p for layer in (states, attention) for n, p in layer.named_parameters() if p.ndim > 1]
    assert any(weight.ndim == 3 for weight in weights)
    work = Work.of(model)
    assert work == Work(sum(map(Tensor.numel, weights)), 64 * 32, 2 * 4 * 8, trained=0.0)
    assert Work.of(tiny_model("mamba")).attention == 0 and Work.of(tiny_model("falcon-h1")).attention > 0


def test_a_token_uses_some_of_the_experts_and_heads_are_linear_maps():
    """What torch counts holds the choice of experts, too."""
    model = tiny_model("mixtral")
    model.set_experts_implementation("batched_mm")
    with FlopCounterMode(display=False) as counted:
        model(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=False)
    flops = counted.get_flop_counts()["Global"]
    found, choices = Work.of(model), 2 * 8 * 2 * 32 * 4
    assert found.forward(8, 0, 8) + choices == sum(flops.values())
    assert Work.of(tiny_model("kimi-linear")) is not None
    packed = torch.zeros(4, 32, 2, 16, dtype=torch.uint8)
    model.model.layers[0].mlp.experts.down_proj = nn.Parameter(packed, requires_grad=False)
    assert Work.of(model) is None
    assert Work.of_maps(nn.Sequential(nn.Linear(3, 5), nn.SiLU(), nn.Linear(5, 7))).head == 15 + 35


def test_a_device_is_known_by_its_name():
    assert known_speed("NVIDIA H100 80GB HBM3") == DEVICES["H100"]
    assert known_speed("NVIDIA H100 PCIe") == DEVICES["H100 PCIe"]
    assert known_speed("NVIDIA A10G") == DEVICES["A10G"] and known_speed("NVIDIA A100-SXM4-80GB") == DEVICES["A100"]
    assert known_speed("NVIDIA L40S") == DEVICES["L40S"] and known_speed("NVIDIA L4") == DEVICES["L4"]
    assert known_speed("") is None


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_orthogonal_keeps_the_singular_vectors(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = orthogonal(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    kept = u.T @ made @ vh.T
    assert torch.allclose(kept, kept.diagonal().diag(), atol=1e-4)
    assert kept.diagonal().min() > 0.6 and kept.diagonal().max() < 1.3


def test_float32_steps_are_those_of_the_library_but_for_its_rounding(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    ours = nn.ParameterList([torch.randn(shape, generator=generator) for shape in ((8, 24), (24, 8))])
    theirs = copy.deepcopy(ours)
    options = {"lr": 0.1, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    made, reference = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    monkeypatch.setattr(optimizer, "has_fast", lambda dtype, device: False)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        made.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=0.01)
        assert torch.equal(made.state[one]["momentum_buffer"], reference.state[other]["momentum_buffer"])
