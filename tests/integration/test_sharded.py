"""Distillation under DDP, FSDP2 and DeepSpeed ZeRO-1/2/3, in two real processes: what one process does, and its draft.

Losses, metrics and weights are those of one process on the same global batches. Both sum the same token losses in
float32, in another order, which is 1e-7 a step; a mean of the two processes' means would be off by 1e-2 and more.
The ways into FSDP2 and ZeRO on the CPU are in `ranks`; neither mixed precision in float16, nor offloading, nor NCCL can
be tried there.
"""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from conftest import tiny_llama
from pipelines import LAST_BITS, configured, furthest, weights
from process_jobs import distilled, loaded
from processes import STRATEGIES, forked, launch_environment, shipped
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from draftsmith.decode.errors import InputError
from draftsmith.distill.config import DraftInit
from draftsmith.train.data.first_look import SCALES
from draftsmith.train.data.shards import write_shard
from draftsmith.train.job.kept_step import KeptStep
from draftsmith.train.options import LoraOptions
from draftsmith.train.runs import save_model

pytestmark = pytest.mark.slow

WRAPPERS = {
    "ddp": ("MULTI_CPU", "DistributedDataParallel", "Parameter", None, False),
    "fsdp2": ("FSDP", "FSDPLlamaForCausalLM", "DTensor", None, False),
    "zero1": ("DEEPSPEED", "DeepSpeedEngine", "Parameter", 1, False),
    "zero2": ("DEEPSPEED", "DeepSpeedEngine", "Parameter", 2, False),
    "zero3": ("DEEPSPEED", "DeepSpeedEngine", "Parameter", 3, True),
}
ORDINARY = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def ground(pipeline, tmp_path_factory, tokenizer) -> Path:
    """A pipeline with a draft of another family, a padded target, one that ends texts early, and one prompt alone."""
    root = tmp_path_factory.mktemp("ground")
    shutil.copytree(pipeline, root, dirs_exist_ok=True)
    vocab = len(tokenizer)
    torch.manual_seed(3)
    small = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 512, "vocab_size": vocab}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    # Tied, other names, Conv1D; no dropout, whose masks no two processes share with one.
    family = GPT2LMHeadModel(GPT2Config(**small, **ends, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    padded = tiny_llama(0, vocab + 13)
    for name, model in {"family": family, "padded": padded}.items():
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        save_model(model, tokenizer, root / name)
    early = AutoModelForCausalLM.from_pretrained(root / "target")
    early.generation_config.eos_token_id = list(range(0, vocab, 4))
    save_model(early, tokenizer, root / "early")
    shutil.copytree(root / "short", root / "same")
    for path in (root / "same").glob("shard-*.parquet"):
        table = pq.ParquetFile(path).read()
        first = table.to_pylist()[0]
        rows = [first | {"id": row["id"]} for row in table.to_pylist()]
        write_shard(path, table.from_pylist(rows, schema=table.schema))
    return root


RESUMED = ("ddp", "fsdp2", "zero2", "zero3")
WHOLLY = ("ddp", "fsdp2", "zero3")
SHORT = 6  # steps, of which the last is in the second epoch


def under(*strategies: str) -> pytest.MarkDecorator:
    """Under each of these: what no strategy changes is tried under those that differ most."""
    return pytest.mark.parametrize("together", strategies, indirect=True, scope="module")


def planned(ground: Path, strategy: str) -> dict[str, dict]:
    """The runs that are compared: of one process, or of two under a strategy."""
    steps = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    # α rises, so that the smallest is the first: an early checkpoint has to be found again.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "alpha", "greater_is_better": False}
    family = {"draft": str(ground / "family"), "heldout": [str(ground / "heldout")]}
    lora = {"target": str(ground / "padded"), "draft": None, "init": DraftInit(layers=1, lora=LoraOptions(r=4))}
    short = {"max_steps": SHORT}
    runs = {
        "best": {"heldout": [str(ground / "heldout")], "training": steps | best},
        "split": family | {"training": short},
        "lora": lora | {"training": short},
    }
    if strategy in WHOLLY:
        parts = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "activation_checkpointing": True}
        parts |= short
        runs["split"] = family | {"training": parts, "target_sharded": True}
        runs["bf16"] = {"training": {"bf16": True} | short}
        runs["on_policy"] = {
            "target": str(ground / "early"),
            "completions": [str(ground / "same")],
            "on_policy": 1.0,
            "on_policy_tokens": 12,
            "training": {"max_steps": 2},
        }
    elif strategy != "one":
        runs = {"best": runs["best"]}
    if strategy in RESUMED:
        # Dropout: each rank's generator has to be restored, too.
        runs["dropping"] = {
            "draft": str(ground / "dropping"),
            "training": {"max_steps": 7, "save_strategy": "steps", "save_steps": 6, "lr_scheduler_type": "linear"},
        }
    return runs


@pytest.fixture(scope="module")
def alone(ground, tmp_path_factory):
    output = tmp_path_factory.mktemp("alone")
    (found,) = forked(distilled, ground, output, planned(ground, "one"), strategy="one")
    return found, output


@pytest.fixture(scope="module")
def together(request, ground, tmp_path_factory):
    output = tmp_path_factory.mktemp(request.param)
    found = forked(distilled, ground, output, planned(ground, request.param), strategy=request.param)
    return request.param, found, output


def logged(found: dict, key: str) -> list[float]:
    return [entry[key] for entry in found["log"] if key in entry]


def assert_same_losses(one: dict, ranks: list[dict], steps: int) -> None:
    assert len(logged(one, "loss")) == len(set(logged(one, "loss"))) == steps
    assert max(logged(one, "epoch")) > 1
    for two in ranks:
        assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5)
        assert logged(two, "grad_norm") == pytest.approx(logged(one, "grad_norm"), rel=1e-4)


def assert_same_metrics(one: dict, two: dict, times: int) -> None:
    for name in ("alpha", "greedy_alpha", "agreement", "mean_acceptance_length", "loss"):
        expected = logged(one, f"eval_{name}")
        assert len(expected) == times and logged(two, f"eval_{name}") == pytest.approx(expected, rel=1e-5)


def assert_same_draft(one: Path, two: Path, tokenizer) -> None:
    """An ordinary directory, whose weights and logits are the other's."""
    names = {path.name for path in two.iterdir()}
    assert names >= ORDINARY and not [name for name in names if "pytorch_model" in name or "partial" in name]
    assert furthest(weights(one), weights(two)) < LAST_BITS
    ids = AutoTokenizer.from_pretrained(two)(["def f(x): return x"], return_tensors="pt")["input_ids"]
    assert ids.tolist() == tokenizer(["def f(x): return x"])["input_ids"]
    with torch.no_grad():
        p, q = (AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (one, two))
    assert p.std() > 0.1 and (p - q).abs().max() < 1e-4


@under(*STRATEGIES)
def test_each_rank_ran_as_it_was_asked_to(together):
    strategy, found, _ = together
    kind, wrapper, parameter, stage, partitioned = WRAPPERS[strategy]
    for rank in found:
        for name, run in rank.items():
            ran = run["ran"]
            assert (ran["num_processes"], ran["backend"], ran["device"]) == (2, "gloo", "cpu")
            assert (ran["distributed_type"], ran["parameter"]) == (kind, parameter)
            assert ran["wrapper"] == (
                wrapper.replace("LlamaForCausalLM", "GPT2LMHeadModel") if name == "split" else wrapper
            )
            assert (ran["stage"], ran["partitioned"]) == (stage, partitioned)


@under(*STRATEGIES)
def test_losses_and_held_out_metrics_are_those_of_one_process(alone, together):
    """Completions of 3 to 12 tokens; five held-out samples, of which the sixth, that fills a batch, must not count."""
    _, (first, second), _ = together
    counts = [
        [sum(map(len, texts)) for texts in (one, two)]
        for one, two in zip(first["best"]["texts"], second["best"]["texts"], strict=True)
    ]
    assert sum(a != b for a, b in counts) >= 4
    assert_same_losses(alone[0]["best"], [first["best"], second["best"]], 8)
    assert_same_metrics(alone[0]["best"], first["best"], 3)


@under(*STRATEGIES)
def test_the_best_checkpoint_is_loaded_and_saved_as_an_ordinary_draft(alone, together, tokenizer):
    _, found, output = together
    for rank in found:
        assert rank["best"]["best"] == str(output / "best" / "checkpoint-3")
    alphas = logged(found[0]["best"], "eval_alpha")
    assert alphas[0] < alphas[1] < alphas[2]
    assert furthest(weights(alone[1] / "best"), weights(alone[1] / "best" / "checkpoint-3")) == 0
    assert_same_draft(alone[1] / "best", output / "best", tokenizer)
    assert KeptStep.left_in(output / "best").step == 3
    assert json.loads((output / "best" / "draftsmith.json").read_text())["config"]["temperature"] == 0.9


@under(*WHOLLY)
def test_accumulation_recomputation_and_a_sharded_target_change_nothing(alone, together, tokenizer):
    """Two micro-batches of 1, their layers computed twice, and half of the target each; a tied GPT-2 draft."""
    _, found, output = together
    assert_same_losses(alone[0]["split"], [rank["split"] for rank in found], SHORT)
    assert_same_metrics(alone[0]["split"], found[0]["split"], 1)
    assert_same_draft(alone[1] / "split", output / "split", tokenizer)
    assert alone[0]["split"]["layers"] == [1] * SHORT
    for rank in found:
        assert rank["split"]["layers"] == [2] * 2 * SHORT
        assert rank["split"]["target"] == ("DTensor", 0.5) and rank["best"]["target"] == ("Parameter", 1.0)


@under(*WHOLLY)
def test_a_carved_draft_starts_from_the_target_and_its_adapters_are_merged(ground, alone, together, tokenizer):
    _, found, output = together
    assert_same_losses(alone[0]["lora"], [rank["lora"] for rank in found], SHORT)
    assert_same_draft(alone[1] / "lora", output / "lora", tokenizer)
    # Neither embeddings nor norms are trained: they are the target's, wherever the padding is not silenced.
    target, draft = weights(ground / "padded"), weights(output / "lora")
    rows = len(tokenizer)
    assert torch.equal(draft["model.embed_tokens.weight"][:rows], target["model.embed_tokens.weight"][:rows])
    scales = draft["model.norm.weight"] / target["model.norm.weight"]  # one for all, as the texts asked for
    assert scales[0] in SCALES and (scales == scales[0]).all()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert 0 < (draft[name] - target[name]).abs().max() < 0.2


@under(*WHOLLY)
def test_half_precision_keeps_to_the_loss(alone, together):
    """bfloat16 has 8 bits: 0.4 % a number, and less in a mean of many.

    Whatever it computes in, the draft is saved in the dtype that it came in.
    """
    _, found, output = together
    assert AutoModelForCausalLM.from_pretrained(output / "bf16", dtype="auto").dtype == torch.float32
    for rank in found:
        half = logged(rank["bf16"], "loss")
        assert half == pytest.approx(logged(alone[0]["best"], "loss")[:SHORT], rel=0.01)
        assert half != pytest.approx(logged(alone[0]["best"], "loss")[:SHORT], rel=1e-5)
        assert set(rank["bf16"]["losses"]) == {"torch.float32"}  # of which FSDP2's policy would keep 8 bits


@under(*WHOLLY)
def test_each_rank_writes_its_own_texts(together):
    """From one and the same prompt; they end at different lengths, which would hang ranks that wait for each other."""
    _, found, _ = together
    first, second = (rank["on_policy"]["texts"] for rank in found)
    assert len(first) == len(second) == 2
    for one, two in zip(first, second, strict=True):
        assert not {tuple(text) for text in one} & {tuple(text) for text in two}
    longest = [[max(map(len, texts)) for texts in rank] for rank in (first, second)]
    assert longest[0] != longest[1]
    assert logged(found[0]["on_policy"], "loss") == logged(found[1]["on_policy"], "loss")


@under(*RESUMED)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(ground, together):
    """From a checkpoint in the second epoch, in new processes: the same texts and, bit for bit, the same losses."""
    strategy, found, output = together
    options = planned(ground, strategy)["dropping"] | {"resumes": str(output / "dropping" / "checkpoint-6")}
    state = json.loads((output / "dropping" / "checkpoint-6" / "trainer_state.json").read_text())
    assert 1 < state["epoch"] < 2
    resumed = forked(distilled, ground, output, {"resumed": options}, strategy=strategy)
    for whole, rest in zip(found, resumed, strict=True):
        assert rest["resumed"]["texts"] == whole["dropping"]["texts"][6:]
        assert logged(rest["resumed"], "loss") == logged(whole["dropping"], "loss")
    assert furthest(weights(output / "dropping"), weights(output / "resumed")) == 0


FSDP1 = ("--use_fsdp", "--fsdp_cpu_ram_efficient_loading", "false", "--fsdp_sync_module_states", "false")
FSDP2 = ("--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        *((name, shipped(name)) for name in STRATEGIES),
        ("ddp", shipped("nodes")),
        ("fsdp2", FSDP2),  # its checkpoints are in shards, by default
        ("zero3", ("--use_deepspeed", "--zero_stage", "3", "--zero3_init_flag", "true")),  # saves none, by default
    ],
    ids=[*STRATEGIES, "nodes", "fsdp2-defaults", "zero3-defaults"],
)
def test_what_accelerate_launch_asks_for_is_done(ground, alone, tmp_path, tokenizer, strategy, flags):
    """Sharding by the launcher alone, of which the config knows nothing; the draft is saved whole all the same."""
    launch = launch_environment(*flags)
    options = {"training": {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}}
    ranks = forked(distilled, ground, tmp_path, {"launched": options}, True, strategy=strategy, launch=launch)
    kind, wrapper, parameter, stage, partitioned = WRAPPERS[strategy]
    for rank in ranks:
        assert rank["launched"]["ran"] == {
            "distributed_type": kind, "num_processes": 2, "backend": "gloo", "device": "cpu", "wrapper": wrapper,
            "parameter": parameter, "stage": stage, "partitioned": partitioned,
        }  # fmt: skip
        # The files of DDP, of several machines and FSDP2 ask for bfloat16, which has 8 bits.
        half = launch["ACCELERATE_MIXED_PRECISION"] == "bf16"
        assert half == (flags in (shipped("ddp"), shipped("nodes"), shipped("fsdp2")))
        expected = pytest.approx(logged(alone[0]["best"], "loss")[:3], rel=0.01 if half else 1e-5)
        assert logged(rank["launched"], "loss") == expected
    found = weights(tmp_path / "launched")
    assert furthest(found, weights(ground / "draft")) > 1e-3
    if flags == FSDP2:
        options |= {"resumes": str(tmp_path / "launched" / "checkpoint-2")}
        resumed = forked(distilled, ground, tmp_path, {"resumed": options}, True, strategy=strategy, launch=launch)
        assert logged(resumed[0]["resumed"], "loss") == logged(ranks[0]["launched"], "loss")
        assert furthest(found, weights(tmp_path / "resumed")) == 0


@pytest.mark.parametrize(
    ("strategy", "flags", "options", "message"),
    [
        ("fsdp2", FSDP2, {"optimizer": "muon"}, "optimizer: expected trainer for a draft sharded by FSDP or DeepSpeed"),
        ("fsdp2", FSDP1, {}, "fsdp_version: expected 2, found 1"),
        ("one", (), {"target_sharded": True}, "target_sharded: expected more than one process, found one"),
    ],
)
def test_what_cannot_be_sharded_is_refused(ground, tmp_path, strategy, flags, options, message):
    launch = launch_environment(*flags) if flags else None
    with pytest.raises(AssertionError, match=f"InputError: {message}"):
        forked(distilled, ground, tmp_path, {"run": options}, bool(flags), strategy=strategy, launch=launch)


@pytest.mark.parametrize("tied", [False, True])
def test_a_process_has_no_more_of_a_sharded_target_than_its_share_in_memory(ground, tmp_path, tokenizer, tied):
    shape = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 7, "num_attention_heads": 4}
    shape |= {"vocab_size": len(tokenizer), "tie_word_embeddings": tied, "max_position_embeddings": 512}
    model = LlamaForCausalLM(LlamaConfig(**shape, rope_theta=1e6)).eval()
    save_model(model, tokenizer, tmp_path / "target")
    with torch.no_grad():
        expected = model(torch.arange(10)[None]).logits
    size = sum(p.nbytes for p in model.parameters())
    assert 180e6 < size < 220e6
    options = {"target": str(tmp_path / "target"), "target_sharded": True}
    first, second = forked(loaded, ground, tmp_path / "out", options, strategy="ddp")
    for rank in (first, second):
        assert rank["parameter"] == "DTensor"
        torch.testing.assert_close(rank["logits"], expected, atol=1e-5, rtol=1e-5)
    # The first reads all of it; the other has half, a matrix that it cuts its share from, and a layer as it computes.
    assert second["peak"] < 0.85 * size < first["peak"]


def test_a_target_is_in_one_place_or_in_shares(ground, tmp_path):
    with pytest.raises(InputError, match="target_sharded: expected false with target_device"):
        configured(ground, tmp_path, target_sharded=True, target_device="cpu")
