"""The plan against what PyTorch allocates on a CPU: activations, the loss, and what a plan says."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from listening import listened
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from draftsmith.decode.cache.kernels import CudaKernels
from draftsmith.decode.errors import InputError
from draftsmith.distill.config import DistillPlanConfig
from draftsmith.distill.memory import DraftPlan
from draftsmith.scripts.plan import command
from draftsmith.train.cli import flags_of, parse_config, run
from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.inside_forward import open_forward
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.losses.positions import LossPositions
from draftsmith.train.memory.activations import (
    Activations,
    BatchShape,
    LiveBytes,
    shadow,
    text_loss,
    trace_cache,
    trace_forward,
    trace_loss,
    trace_step,
)
from draftsmith.train.memory.setting import GIB
from draftsmith.train.memory.states import Weights
from draftsmith.train.memory.training import TracedStep
from draftsmith.train.runs import save_model

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"
ROWS, LENGTH = 4, 128
DEEP, SHALLOW = (
    LlamaConfig(
        vocab_size=4096, hidden_size=256, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=688, bos_token_id=None, eos_token_id=None,
    )
    for layers in (4, 2)
)  # fmt: skip


def faked(shape: LlamaConfig) -> tuple[FakeTensorMode, LlamaForCausalLM]:
    mode = FakeTensorMode()
    with mode:
        model = LlamaForCausalLM(shape)
    return mode, model


def traced(mode: FakeTensorMode, model: PreTrainedModel, precision: str, checkpointing: bool = False) -> Activations:
    batch = BatchShape(LENGTH, ROWS)
    return trace_step(mode, model, batch, text_loss(model, batch, precision), checkpointing)


@pytest.fixture(scope="module")
def fake():
    return faked(SHALLOW)


def really_saved(model: PreTrainedModel, amp: bool, checkpointing: bool) -> int:
    """What autograd saves in a forward, each storage once, the weights and the batch left out.

    In groups of query heads, without a mask, CUDA has a kernel for half precision alone: float32 falls to math.
    """
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor keeps its address from being used again
        return tensor

    inputs = BatchShape(LENGTH, ROWS).inputs(ROWS)
    saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with saving, torch.autocast("cpu", enabled=amp), CudaKernels() as kernels:
        hidden = last_hidden(model.train(), **inputs)
    assert hidden.requires_grad and set(kernels.chosen) == {"flash" if amp else "math"}
    ours = {t.untyped_storage().data_ptr() for t in inputs.values()}
    return sum(size for address, (size, _) in saved.items() if address not in ours)


@pytest.mark.parametrize(("amp", "checkpointing"), [(False, False), (True, True)])
def test_activations_are_what_autograd_saves(amp, checkpointing):
    planned = traced(*faked(DEEP), "autocast" if amp else "float32", checkpointing)
    saved = really_saved(LlamaForCausalLM(DEEP), amp, checkpointing)
    kept = planned.after_loss(ROWS)
    # Beyond what autograd saves are a few tables of cosines and a mask that checkpointed layers take as arguments.
    assert saved <= kept <= saved + (0.06 if checkpointing else 0.001) * saved
    assert kept > 2**21


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("amp", [False, True])
def test_activations_are_what_a_real_step_allocates(fake, amp, checkpointing):
    mode, shape = fake
    precision = "autocast" if amp else "float32"
    planned = traced(mode, shape, precision, checkpointing)
    model = LlamaForCausalLM(SHALLOW).train()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes() as live:
        inputs = BatchShape(LENGTH, ROWS).labelled(ROWS)
        positions = LossPositions(inputs.pop("positions")[0])
        with torch.autocast("cpu", enabled=amp):
            whole = last_hidden(model, **inputs)
            hidden = positions.take(whole)
            in_loss = live.now
            total = hidden.sum()
            del hidden, whole, positions, inputs
        kept = live.now
        live.restart()
        total.backward()
    assert (planned.in_loss(ROWS), planned.after_loss(ROWS)) == (in_loss, pytest.approx(kept, abs=8))
    # The gradient of a sum is one number, and not as many as there are hidden states.
    states = ROWS * (LENGTH - 1) * 256 * 4
    assert live.peak - 8 <= planned.backward(ROWS) <= live.peak + states + 8


def test_a_forward_without_gradients_is_what_it_allocates(fake):
    planned = trace_forward(*fake, BatchShape(LENGTH, ROWS), "float32")
    model, inputs = LlamaForCausalLM(SHALLOW).eval(), BatchShape(LENGTH, ROWS).inputs(ROWS)
    with LiveBytes() as live, torch.no_grad():
        last_hidden(model, **inputs)
    assert planned(ROWS) == live.peak
    cache = trace_cache(*fake, BatchShape(LENGTH, ROWS), "float32")
    assert cache(ROWS) == pytest.approx(2 * 2 * ROWS * 2 * LENGTH * 64 * 4, rel=0.01)  # k and v, layers, B, heads, T, D


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_of_experts_takes_what_it_allocates_in_either_dtype(dtype):
    """The product of experts has shapes without data in bfloat16 alone."""
    config = MixtralConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, num_local_experts=4, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    mode = FakeTensorMode()
    with mode:
        shape = MixtralForCausalLM._from_config(config, dtype=dtype)
    planned = trace_forward(mode, shape, BatchShape(LENGTH, ROWS), "float32")
    model, inputs = MixtralForCausalLM._from_config(config, dtype=dtype).eval(), BatchShape(LENGTH, ROWS).inputs(ROWS)
    with LiveBytes() as live, torch.no_grad():
        last_hidden(model, **inputs)
    assert planned(ROWS) == live.peak
    step = traced(mode, shape, "float32")
    assert step.backward(ROWS) > step.after_loss(ROWS) > planned(ROWS)


def test_a_layer_in_half_precision_is_that_of_the_formula():
    """Korthikanti et al. 2022, section 4.1: 34·s·b·h less two dropout masks of s·b·h, without 5·a·s²·b."""
    h, kept = 256, []
    for layers in (1, 2):
        mode = FakeTensorMode()
        with mode:
            config = GPT2Config(
                vocab_size=512, n_embd=h, n_layer=layers, n_head=4, n_positions=LENGTH, activation_function="gelu",
                attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
            )  # fmt: skip
            model = GPT2LMHeadModel(config)
        shadow(mode, model, half=True)
        kept.append(traced(mode, model, "half").after_loss(ROWS))
    found = (kept[1] - kept[0]) / (ROWS * LENGTH * h)
    # Moments of the norms, and the log of the sums that attention keeps.
    assert 32 <= found <= 32.5


@pytest.fixture(scope="module")
def pair(pipeline, tokenizer, tmp_path_factory):
    """Models with a few MB of activations, saved."""
    root = tmp_path_factory.mktemp("plan")
    for name, seed, layers, hidden in (("target", 0, 2, 192), ("draft", 1, 1, 128)):
        model = tiny_llama(seed, len(tokenizer), layers=layers, hidden=hidden)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        save_model(model, tokenizer, root / name)
    return root


def flags(pair: Path, **options: object) -> list[str]:
    values = {"target": pair / "target", "draft": pair / "draft", "completions": "[c]", "sequence_length": LENGTH}
    values |= {"training.output_dir": pair / "out", "training.per_device_train_batch_size": ROWS}
    return flags_of(values | options)


def planned(pair: Path, **options: object) -> DraftPlan:
    argv = [*flags(pair, **options), "--training.use_cpu", "true"]
    return parse_config(DistillPlanConfig, argv).memory_plan()


@pytest.mark.parametrize(
    ("name", "cached"),
    [
        ("forward_kl", False),
        ("tvd", False),
        ("cross_entropy", False),
        ("lk_hybrid", False),
        ("forward_kl", True),
        ("lk_hybrid", True),
    ],
)
def test_the_loss_is_what_it_allocates(pair, name, cached):
    """Chunks of 40 positions, parts of 5; two chunks are traced, further ones reckoned."""
    plan = planned(pair, divergence=name, **({"teacher_cache": "[c]", "prompt_loss": False} if cached else {}))
    tokens = plan.vocabulary(plan.setting)
    plan.sizes, plan.positions = ChunkSizes(40 * tokens, 5 * tokens), lambda rows, learns: 50 * rows
    reckoned = plan.loss_bytes(plan.setting, 4)
    # The same code on real tensors, all five chunks of it.
    draft, target = (tiny_llama(seed, tokens, layers=1, hidden=size) for seed, size in ((1, 128), (0, 192)))
    open_forward(draft.requires_grad_(True), draft.get_output_embeddings())
    plan.drafter, plan.target, plan.mode = lambda _: draft, lambda _: target, nullcontext()
    step = TracedStep(plan.setting.traced, positions=200)
    plan._trainers(step)
    assert reckoned == pytest.approx(trace_loss(plan.mode, draft, partial(plan.loss, step)), rel=0.01)


def test_a_loss_over_a_cut_vocabulary_holds_a_copy_of_the_teachers_rows(pair):
    """Not one that looks at the other tokens, too."""
    copied = []
    for name in ("forward_kl", "lk_hybrid"):
        plan = planned(pair, divergence=name, **{"init.draft_vocabulary": 100})
        copied.append(plan.held(plan.setting)["target: the head of the tokens that are drafted"])
    assert copied == [100 * plan.target_shape.hidden_size * 4, 0.0]


@pytest.fixture(scope="module")
def plan(pair) -> DraftPlan:
    """Of two GPUs; what is traced for one test serves the others."""
    return planned(pair, gpus=2, loss_chunk=2**14, **{"training.gradient_accumulation_steps": 3})


def test_the_verdict_is_the_exit_code(pair, plan, capsys):
    needed = plan.total(plan.setting) / GIB + plan.config.reserve
    options = {"gpu_memory": needed - 1e-3, "gpus": 2, "loss_chunk": 2**14, "training.gradient_accumulation_steps": 3}
    with listened() as heard:
        assert run(lambda: command.main(flags(pair, **options))) == command.DOES_NOT_FIT
    heard.require("plan")
    out = capsys.readouterr().out
    assert f"4 rows × 3 accumulated × 2 GPUs = 24 samples, at most {24 * LENGTH:,} tokens" in out
    assert "k = 32: 200 bytes per completion token" in out
    assert "does not fit; the largest micro batch that does" in out and "→" in out


def test_a_run_that_fits_gets_no_advice(plan, capsys, monkeypatch):
    monkeypatch.setattr(plan, "capacity", plan.total(plan.setting))
    assert command.report(plan, Console())
    out = capsys.readouterr().out
    assert f"fits; the largest micro batch that does: {ROWS} rows" in out and "→" not in out
    over = replace(plan.setting, rows=ROWS + 1)
    assert plan.total(over) > plan.capacity


def test_each_change_that_is_proposed_makes_it_fit(plan, monkeypatch):
    monkeypatch.setattr(plan, "capacity", plan.total(plan.setting) - 1e-3 * GIB)
    changes = list(plan.changes())
    expected = {"training.bf16 true", "target_dtype bfloat16", "strategy zero3"}
    assert expected <= {name for name, _ in changes}
    assert all(plan.fits(change) and change != plan.setting for _, change in changes)


def test_where_no_change_is_enough_several_are(plan, monkeypatch):
    monkeypatch.setattr(plan, "capacity", 0.003 * GIB)
    ((names, change),) = plan.changes()
    assert names.count(",") >= 1 and plan.fits(change)


def test_nothing_helps_a_pair_that_is_too_large(plan, capsys, monkeypatch):
    monkeypatch.setattr(plan, "capacity", 0.0001 * GIB)
    assert not command.report(plan, Console())
    out = capsys.readouterr().out
    assert "not even one row" in out and "no change of this plan's makes it fit" in out


def test_a_carved_draft_a_cache_and_adapters_are_planned(pair, tmp_path):
    plain = planned(pair)
    carved = planned(pair, draft="null", **{"init.layers": 1})
    shape = carved.drafter(carved.setting).config
    assert (shape.num_hidden_layers, shape.hidden_size) == (1, 192)
    narrow = planned(pair, draft="null", **{"init.layers": 2, "init.hidden_size": 64, "init.attention_heads": 2})
    assert narrow.drafter(narrow.setting).config.hidden_size == 64
    random = planned(pair, draft="null", **{"init.config": '{"num_hidden_layers": 1, "intermediate_size": 32}'})
    assert random.drafter(random.setting).config.intermediate_size == 32

    cached = planned(pair, teacher_cache="[laws]")
    held = cached.held(cached.setting)
    assert not any(name.startswith("target") for name in held)
    assert cached.total(cached.setting) < plain.total(plain.setting)

    sizes = []
    for options in ({}, {"target_sharded": True}, {"target_quantization": "4bit"}, {"target_device": "cuda:1"}):
        other = planned(pair, gpus=8, **options)
        sizes.append(sum(size for name, size in other.held(other.setting).items() if name.startswith("target")))
        assert (other.target_forward(other.setting) == {}) == ("target_device" in options)
    assert sizes[0] > sizes[2] > sizes[3] > 0 and len(set(sizes)) == 4
    served = planned(pair, gpus=8, teacher="vllm:http://a:1")
    assert served.held(served.setting) == other.held(other.setting)
    assert "states from servers: 768 bytes a token, after layers 2 (the last), in float32" in served.facts()
    assert served.remarks() == ["of the target, on servers, the head alone is counted"]
    (tmp_path / "manifest.json").write_text('{"schema": "draftsmith.features/2"}')
    states = planned(pair, gpus=8, teacher_cache=f"[{tmp_path}]")
    assert states.held(states.setting) == other.held(other.setting)
    assert states.remarks() == ["of the target, in a cache, the head alone is counted"]

    lora = planned(pair, **{"init.lora.r": 4})
    draft = lora.drafter(lora.setting)
    numbers = Weights.of(draft)
    adapters = [p for n, p in draft.named_parameters() if "lora_" in n]
    assert numbers.trained == sum(p.numel() for p in adapters) < 0.2 * numbers.all
    assert lora.total(lora.setting) < plain.total(plain.setting)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_spreading_a_draft_takes_less_of_each_gpu(pair, strategy):
    half = {"training.bf16": True, "gpus": 8}
    whole, spread = planned(pair, **half), planned(pair, strategy=strategy, **half)
    assert spread.setting.precision == "half" and whole.setting.precision == "autocast"
    held = [sum(p.held(p.setting).values()) for p in (whole, spread)]
    assert held[1] < held[0]
    with pytest.raises(InputError, match=f"optimizer: expected trainer for a draft under {strategy}, found muon"):
        planned(pair, strategy=strategy, optimizer="muon")


def test_a_padded_vocabulary_is_counted(tmp_path):
    """The draft's 50304 rows become the target's 50432."""
    options = {"target": "EleutherAI/pythia-6.9b", "draft": "EleutherAI/pythia-160m"}
    options |= {"target_config": CONFIGS / "pythia-6.9b.json", "draft_config": CONFIGS / "pythia-160m.json"}
    plans = [planned(tmp_path, **options, **{"init.pad_vocabulary": value}) for value in (True, False)]
    padded, plain = (plan.drafter(plan.setting).num_parameters() for plan in plans)
    assert padded - plain == 2 * 128 * 768


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sequence_length": 4096}, "sequence_length: expected at most the target's 512, found 4096"),
        ({"gpus": 0}, "gpus: expected at least 1, found 0"),
        ({"gpu_memory": 2}, "gpu_memory: expected more than the reserve of 3.0, found 2.0"),
        ({"strategy": "zero4"}, "strategy"),
        ({"target_dtype": "int4"}, "target_dtype: expected one of float32, "),
        ({"training.optim": "galore_adamw"}, "training.optim: expected one of adamw_torch, "),
        ({"target": "nobody/nothing"}, "--target_config"),
        ({"draft": "nobody/nothing"}, "--draft_config"),
        ({"draft_config": "nowhere.json"}, "draft_config: expected a config.json, found nothing at nowhere.json"),
    ],
)
def test_bad_input_is_refused_in_one_line(pair, capsys, options, said):
    assert run(lambda: command.main(flags(pair, **options))) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and said in line


def test_a_length_is_needed(pair, capsys):
    argv = [flag for flag in flags(pair) if not flag.startswith("--sequence_length")]
    assert run(lambda: command.main(argv)) == 2
    assert "sequence_length: expected the tokens of a sample" in capsys.readouterr().err
