"""What a plan says: what is held, hours, the verdict, and what it refuses."""

from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from listening import listened

from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.scripts import cli, plan
from draftsmith.train.cli import flags_of
from draftsmith.train.job.flops import Work
from draftsmith.train.memory.machines import GIB, RESERVE
from draftsmith.train.memory.states import Weights
from draftsmith.train.runs import save_model

ROOT = Path(__file__).parents[2]
SHAPES = ROOT / "tests" / "golden" / "configs"
ROWS, LENGTH, VOCAB = 4, 64, 300
PAIRS = {
    "qwen3-8b-to-0.6b-parallel": "qwen3-0.6b",
    "pythia-6.9b-to-160m": "pythia-160m",
    "gpt2-to-distilgpt2": "distilgpt2",
}
LARGE = [*(f"distill/{name}" for name in (*PAIRS, "llama-3.1-8b-carved")), "medusa/qwen3-8b", "block/qwen3.6-27b-fp8"]


@pytest.fixture(scope="module")
def pair(tokenizer, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("plan")
    for name, seed, layers, hidden in (("target", 0, 4, 128), ("draft", 1, 1, 64)):
        model = tiny_llama(seed, len(tokenizer), layers=layers, hidden=hidden)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        save_model(model, tokenizer, root / name)
    return root


def argv(pair: Path, recipe: str, **options: object) -> list[str]:
    values = {"target": pair / "target", "completions": "[c]", "max_length": LENGTH, "loss_chunk": 2**17}
    values |= {"draft": pair / "draft"} if recipe == "distill" else {}
    values |= {"training.output_dir": pair / "out", "training.per_device_train_batch_size": ROWS} | options
    return [recipe, *flags_of(values)]


def planned(pair: Path, recipe: str, **options: object):
    command, config, machines = plan.planned_run(argv(pair, recipe, **options))
    return command.memory_plan(config, machines)


def test_the_verdict_is_the_exit_code(pair, capsys):
    found = planned(pair, "distill", gpus=2)
    for fits in (True, False):
        memory = (found.total + RESERVE) / GIB + (1e-6 if fits else -1e-6)
        options = {"gpus": 2, "gpu_memory": memory, "training.gradient_accumulation_steps": 3}
        with listened() as heard:
            assert cli.main(["plan", *argv(pair, "distill", **options)]) == (0 if fits else plan.DOES_NOT_FIT)
        heard.require("plan")
        out = capsys.readouterr().out
        assert f"4 rows × 3 accumulated × 2 GPUs = 24 samples, at most {24 * LENGTH:,} tokens" in out
        assert ("does not fit" in out) == ("activation_checkpointing" in out) == (not fits)


def test_a_target_is_held_where_it_is(pair, tmp_path):
    sizes = []
    for options in ({}, {"target_sharded": True}, {"target_quantization": "4bit"}):
        found = planned(pair, "distill", gpus=8, **options)
        sizes.append(sum(size for name, size in found.held.items() if name.startswith("target")))
        assert "teacher" in found.moments
    head = VOCAB * 128 * 4
    assert sizes[0] > sizes[1] > head and sizes[0] > sizes[2] > head
    (tmp_path / "manifest.json").write_text('{"schema": "draftsmith.features/2"}')
    for options in ({"teacher": "vllm:http://a:1"}, {"teacher_cache": f"[{tmp_path}]"}):
        states = planned(pair, "distill", gpus=8, **options)
        assert sum(size for name, size in states.held.items() if name.startswith("target")) == head
        assert "teacher" not in states.moments
    laws = planned(pair, "distill", teacher_cache="[laws]", prompt_loss=False)
    assert not any(name.startswith("target") for name in laws.held) and laws.total < states.total


@pytest.mark.parametrize(
    ("recipe", "options", "ends"), [("medusa", {}, 1), ("medusa", {"hydra": True}, 2), ("eagle", {}, 2)]
)
def test_a_cache_leaves_the_head_of_the_target_and_embeddings_if_heads_see_them(pair, recipe, options, ends):
    live, cached = planned(pair, recipe, **options), planned(pair, recipe, teacher_cache="[features]", **options)
    assert cached.held[f"target: {'embeddings and ' * (ends > 1)}head"] == ends * VOCAB * 128 * 4
    assert cached.total < live.total and cached.hours < live.hours
    served = planned(pair, recipe, teacher="vllm:http://a:1", **options)
    assert served.held == cached.held
    layers = "1, 2, 3, 4 (the last)" if recipe == "eagle" else "4 (the last)"
    assert plan.outlook(served)[0].endswith(f"bytes a token, after layers {layers}, in float32")


def test_initial_drafts_are_made_without_data(pair):
    plain = planned(pair, "distill")
    for init, name, value in (
        ({"init.layers": 1}, "num_hidden_layers", 1),
        ({"init.config": '{"num_hidden_layers": 1, "intermediate_size": 32}'}, "intermediate_size", 32),
    ):
        assert getattr(planned(pair, "distill", draft="null", **init).drafter.config, name) == value
    lora = planned(pair, "distill", **{"init.lora.r": 4})
    adapters = [p for n, p in lora.drafter.named_parameters() if "lora_" in n]
    numbers = Weights.of(lora.drafter)
    assert numbers.trained == sum(p.numel() for p in adapters) < 0.2 * numbers.all and lora.total < plain.total


def test_a_padded_vocabulary_is_counted(pair):
    """The draft's 50304 rows become the target's 50432."""
    options = {"target": SHAPES / "pythia-6.9b.json", "draft": SHAPES / "pythia-160m.json"}
    plans = [planned(pair, "distill", **options, **{"init.pad_vocabulary": value}) for value in (True, False)]
    padded, plain = (found.drafter.num_parameters() for found in plans)
    assert padded - plain == 2 * 128 * 768


def test_masks_take_entries_and_under_sdpa_a_mask_of_their_square(pair):
    kinds = {"plain": {}, "sdpa": {"parallel": 4, "parallel_mask_token": 1}}
    kinds["flex"] = kinds["sdpa"] | {"attn_implementation": "flex_attention"}
    half = {"training.bf16": True}  # float32 in groups has the math kernel, which holds more
    found = {name: planned(pair, "distill", **options, **half) for name, options in kinds.items()}
    forward = {name: each.moments["forward"] for name, each in found.items()}
    assert forward["plain"] < forward["flex"] < forward["sdpa"]
    assert found["plain"].hours < found["flex"].hours


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_spreading_a_draft_takes_less_of_each_gpu(pair, strategy):
    half = {"training.bf16": True, "gpus": 8}
    whole, spread = planned(pair, "distill", **half), planned(pair, "distill", strategy=strategy, **half)
    assert (whole.precision, spread.precision) == ("autocast", "half")
    assert sum(spread.held.values()) < sum(whole.held.values())


def test_adapters_train_little_and_all_of_a_backbone_much(pair):
    found = {name: planned(pair, "medusa", backbone=name, num_heads=2) for name in ("frozen", "lora", "full")}
    assert found["frozen"].total < found["lora"].total < found["full"].total
    lora = found["lora"]
    trained = [p for n, p in lora.target.named_parameters() if "lora_" in n] + list(lora.drafter.parameters())
    assert lora.held["trained: gradients"] == 4 * sum(p.numel() for p in trained)
    whole = 4.0 * sum(p.numel() for p in found["full"].target.parameters())
    assert found["full"].held["the target as it was: weights in float32, whole"] == whole


def test_heads_to_continue_from_are_planned_as_they_are(pair, tmp_path):
    target = tiny_llama(0, VOCAB, layers=4, hidden=128)
    EagleHeads.of_target(target, torch.arange(50), [1, 3]).save_pretrained(tmp_path)
    found = planned(pair, "eagle", heads=tmp_path)
    assert found.layer_ids == [1, 3] and found.drafter.config.draft_vocab_size == 50


def test_hours_are_the_arithmetic_at_the_speed_that_is_assumed(pair):
    machines = {"tokens": 1e9, "gpus": 4, "mfu": 0.5, "device": "A100"}
    target = Work.of(tiny_llama(0, VOCAB, layers=4, hidden=128)).forward(1, LENGTH / 2, 1)
    heads = 3 * 2 * (128 * 128 + 128 * VOCAB) * 3  # forward and backward of three heads
    found = planned(pair, "medusa", **machines, num_heads=3, lm_heads="shared")
    assert found.hours == pytest.approx(1e9 * (target + heads) / (0.5 * 312e12 * 4 * 3600))
    eagle = [planned(pair, "eagle", **{"training.activation_checkpointing": value}).hours for value in (False, True)]
    assert eagle[0] < eagle[1]
    assert [plan.time_words(hours) for hours in (1234.5, 2, 1.9, 0.03)] == [
        "1,234 hours", "2.0 hours", "114 minutes", "108 seconds",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("shipped", LARGE)
def test_a_shipped_config_fits(shipped, monkeypatch):
    """Layers are alike: two are traced, and one more of a draft, whose layers keep states for the backward."""
    monkeypatch.chdir(ROOT)
    file, (recipe, _, name) = ROOT / f"configs/{shipped}.yaml", shipped.partition("/")
    flags = ["--target", str(SHAPES / f"{name.partition('-to-')[0].removesuffix('-carved')}.json"), "--gpus", "8"]
    flags += ["--draft", str(SHAPES / f"{PAIRS[name]}.json")] if name in PAIRS else []
    flags += ["--teacher", "vllm:http://a:1"] if "27b" in name else []

    def traced(layers: int | None, *more: str):
        command, config, machines = plan.planned_run([recipe, "--config", str(file), *flags, *more])
        found = command.memory_plan(config, machines)
        assert found.held  # of whole models
        models = [found.target, *[found.drafter] * (name in PAIRS)]
        stacks = [next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList)) for model in models]
        left_out = len(stacks[-1][layers:])
        for stack in stacks:
            del stack[layers or len(stack) :]
        return found, found.moments, left_out

    found, moments, left_out = traced(2)
    if name in PAIRS:
        again = traced(3, "--training.eval_strategy", "no")[1].items()
        found.moments.update({key: moments[key] + left_out * (size - moments[key]) for key, size in again})
    assert "gpt2" not in name or moments == pytest.approx(traced(None)[1])
    assert found.fits
    text, total = file.read_text().replace("\n# ", " "), (found.total + RESERVE) / GIB
    assert recipe not in ("distill", "medusa") or f"{total:.0f} GiB of each" in text


@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        ("distill", {"max_length": "null"}, "max_length: expected the tokens of a sample"),
        ("distill", {"gpus": 0}, "gpus: expected at least 1, found 0"),
        ("distill", {"gpu_memory": 2}, "gpu_memory: expected more than the reserve of 3.0, found 2.0"),
        ("distill", {"gpu_memory": ".nan"}, "gpu_memory: expected a finite number, more than 0"),
        ("distill", {"strategy": "zero4"}, "strategy"),
        ("distill", {"device": "TPU"}, "device: expected one of B200"),
        ("distill", {"mfu": 1.5}, "mfu: expected a share"),
        ("distill", {"target_dtype": "int4"}, "target_dtype: expected one of "),
        ("distill", {"training.optim": "galore_adamw"}, "training.optim: expected one of adamw_torch, "),
        ("distill", {"target": "nobody/nothing"}, "target: expected a model directory"),
        ("distill", {"draft": "nobody/nothing"}, "draft: expected a model directory"),
        ("distill", {"strategy": "zero2", "optimizer": "muon"}, "optimizer: expected trainer for a draft under zero2"),
        ("distill", {"target_sharded": True}, "target_sharded: expected more than one process, found one"),
        ("medusa", {"draft_vocabulary": 301}, "draft_vocabulary: expected at most 300"),
        ("eagle", {"layer_ids": "[2, 9]"}, "layer_ids: expected ascending depths between 1 and the target's 4 layers"),
        ("eagle", {"heads": "nowhere"}, "EAGLE-3 heads: expected a model directory or a hub id"),
        ("eagle", {"target": SHAPES / "gpt2.json"}, "target: expected a model whose decoder has its layers"),
        ("export", {}, "plan: expected a command that trains (distill, medusa, eagle, block, mtp)"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_line(pair, capsys, recipe, options, said):
    assert cli.main(["plan", *argv(pair, recipe, **options)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line
