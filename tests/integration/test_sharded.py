"""Every kind under DDP, FSDP2 and DeepSpeed ZeRO, in two real processes: what one process does, and whole weights.

Losses, metrics and weights are those of one process on the same global batches. Both sum the same token losses in
float32, in another order, which is 1e-7 a step; a mean of the two processes' means would be off by 1e-2 and more.
The ways into FSDP2 and ZeRO on the CPU are in `processes`; neither mixed precision in float16, nor offloading, nor NCCL
can be tried there.
"""

import json
import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from conftest import tiny_llama
from pipelines import LAST_BITS, configured, furthest, weights
from process_jobs import head_logits, loaded, trained
from processes import exit_code, forked, launch_environment, shipped
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from draftsmith.decode.errors import InputError
from draftsmith.distill.config import DraftInit
from draftsmith.scripts import cli
from draftsmith.train.data.first_look import SCALES
from draftsmith.train.data.shards import write_shard
from draftsmith.train.job.kept_step import KeptStep
from draftsmith.train.options import LoraOptions
from draftsmith.train.runs import save_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

RAN = {
    "ddp": ("MULTI_CPU", "Parameter", None, False),
    "fsdp2": ("FSDP", "DTensor", None, False),
    "zero2": ("DEEPSPEED", "Parameter", 2, False),
    "zero3": ("DEEPSPEED", "Parameter", 3, True),
}
WRAPPERS = {"ddp": "DistributedDataParallel", "fsdp2": "FSDP", "zero2": "DeepSpeedEngine", "zero3": "DeepSpeedEngine"}
ORDINARY = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
EVERY, WHOLLY, SHARDED = tuple(RAN), ("ddp", "fsdp2", "zero3"), ("fsdp2", "zero3")


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


STEPS = {"max_steps": 2}
MEASURED = STEPS | {"eval_strategy": "steps", "eval_steps": 1}
TWICE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
"""Two micro-batches of each process."""
# α rises, so that the smallest is the first: an early checkpoint has to be found again.
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "alpha", "greater_is_better": False}
EVERY_SECOND = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
# Ten samples are two whole batches an epoch: the checkpoint is in the second.
RESUMABLE = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3, "eval_steps": 3}
RESUMABLE |= {"lr_scheduler_type": "linear", "dataloader_drop_last": True}

RUNS: dict[str, tuple[tuple[str, ...], dict, dict]] = {
    # name: the strategies it is tried under, its options, and what two processes have in addition
    "draft, best": (EVERY, {"kind": "draft", "heldout": True, "training": {"max_steps": 4} | EVERY_SECOND | BEST}, {}),
    "draft, split": (
        WHOLLY,
        {"kind": "draft", "draft": "family", "heldout": True},
        {"target_sharded": True, "training": TWICE | {"activation_checkpointing": True}},
    ),
    "draft, carved": (
        SHARDED,
        {"kind": "draft", "target": "padded", "draft": None, "init": DraftInit(layers=1, lora=LoraOptions(r=4))},
        {},
    ),
    "parallel, packed": (
        ("fsdp2",),
        {"kind": "draft", "parallel": 3, "packing": True, "max_length": 48, "divergence": "lk_hybrid", "heldout": True}
        | {"training": MEASURED | {"dataloader_drop_last": True}},  # two processes fill up rows
        {},
    ),
    "Hydra": (("ddp",), {"kind": "medusa", "hydra": True, "heldout": True, "training": MEASURED}, {}),
    "Medusa, shared": (
        ("ddp",),
        {"kind": "medusa", "lm_heads": "shared", "num_layers": 2, "draft_vocabulary": 40, "divergence": "jsd"},
        {"target_sharded": True, "training": TWICE},
    ),
    # DeepSpeed cannot warm up heads alone.
    "joint, adapters, warm": (
        ("fsdp2",),
        {"kind": "medusa", "backbone": "lora", "lora": LoraOptions(r=4), "warmup_heads": 0.5, "heldout": True}
        | {"training": MEASURED | {"weight_decay": 0.1}},
        {},
    ),
    "joint, whole": (
        SHARDED,
        {"kind": "medusa", "backbone": "full", "completions": "long", "heldout": True}
        | {"training": MEASURED | RESUMABLE},
        {},
    ),
    "joint, adapters": (("zero3",), {"kind": "medusa", "backbone": "lora", "lora": LoraOptions(r=4)}, {}),
    "EAGLE-3, cut": (
        ("zero3",),
        {"kind": "eagle", "draft_vocabulary": 40, "init": "random", "divergence": {"lk_hybrid": 1.0, "nla": 0.5}},
        {"training": TWICE},
    ),
    "EAGLE-3, copied": (
        ("zero3",),
        {"kind": "eagle", "norm_output": True, "heldout": True, "training": MEASURED},
        {"target_sharded": True, "training": {"activation_checkpointing": True}},
    ),
    "DSpark": (
        ("ddp", "zero3"),
        {"kind": "block", "draft_vocabulary": 40, "init": "random", "layers": 2, "confidence": 1.0, "dpace": 0.5}
        | {"divergence": {"cross_entropy": 0.1, "tvd": 1.8}, "heldout": True, "training": MEASURED},
        {"training": TWICE | {"activation_checkpointing": True}},
    ),
    "DFlash 2": (
        ("fsdp2",),
        {"kind": "block", "markov_rank": 0, "selector_rank": 4, "anchor_guesses": False, "block_size": 4},
        {},
    ),
    "Domino": (("zero3",), {"kind": "block", "markov_rank": 0, "domino_rank": 4}, {}),
    "MTP": (("fsdp2",), {"kind": "mtp"}, {"target_sharded": True}),
    "MTP, a step for each layer": (
        ("zero3",), {"kind": "mtp", "num_layers": 2, "divergence": "cross_entropy"}, {"target_sharded": True},
    ),
}  # fmt: skip
ALONE = {  # of two processes alone, or compared with another run
    # Dropout: each rank's generator has to be restored, too.
    "draft, dropping": (WHOLLY, {"kind": "draft", "draft": "dropping", "completions": "long", "training": RESUMABLE}),
    "draft, bfloat16": (("fsdp2",), {"kind": "draft", "training": {"max_steps": 4, "bf16": True}}),
    "draft, own texts": (
        SHARDED,
        {"kind": "draft", "target": "early", "completions": "same", "on_policy": 1.0, "on_policy_tokens": 12},
    ),
    "joint, bfloat16": (
        ("fsdp2",),
        {"kind": "medusa", "backbone": "lora", "lora": LoraOptions(r=4), "target_dtype": "bfloat16"}
        | {"save_dtype": "bfloat16", "training": STEPS | {"save_strategy": "steps", "save_steps": 2}},
    ),
}
RESUMED = ("draft, dropping", "joint, whole")


def planned(ground: Path, strategy: str) -> dict[str, dict]:
    """The runs of one process, or of two under a strategy."""
    found = {}
    for name, (strategies, options, more) in RUNS.items():
        if strategy == "one":
            found[name] = options
        elif strategy in strategies:
            found[name] = options | more | {"training": STEPS | options.get("training", {}) | more.get("training", {})}
    found |= {name: options for name, (strategies, options) in ALONE.items() if strategy in strategies}
    return {name: placed(ground, options) for name, options in found.items()}


def placed(ground: Path, options: dict) -> dict:
    """Options with the paths of what they name."""
    options = {"training": STEPS} | options
    if options.get("heldout"):
        options["heldout"] = [str(ground / "heldout")]
    if "completions" in options:
        options["completions"] = [str(ground / options["completions"])]
    for name in ("target", "draft"):
        if options.get(name) is not None:
            options[name] = str(ground / options[name])
    return options


@pytest.fixture(scope="module")
def alone(ground, tmp_path_factory):
    output = tmp_path_factory.mktemp("alone")
    (found,) = forked(trained, ground, output, planned(ground, "one"), strategy="one")
    return found, output


@pytest.fixture(scope="module")
def together(request, ground, tmp_path_factory):
    output = tmp_path_factory.mktemp(request.param)
    found = forked(trained, ground, output, planned(ground, request.param), strategy=request.param)
    return request.param, found, output


def under(*strategies: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("together", strategies, indirect=True, scope="module")


def logged(found: dict, key: str) -> list[float]:
    return [entry[key] for entry in found["log"] if key in entry]


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items()}


@under(*EVERY)
def test_two_processes_are_one(alone, together, tokenizer):
    """Losses, gradients, what is measured on each rank, and what is saved, whole, in an ordinary directory."""
    strategy, found, output = together
    for name, (strategies, options, _) in RUNS.items():
        if strategy not in strategies:
            continue
        one = alone[0][name]
        metrics = {key for entry in one["log"] for key in entry if key.startswith("eval_")}
        metrics = {key for key in metrics if not key.endswith(("runtime", "per_second"))}
        assert bool(metrics) == ("heldout" in options) and len(set(logged(one, "loss"))) > 1, name
        for rank in found:
            run, ran = rank[name], rank[name]["ran"]
            assert (ran["num_processes"], ran["backend"], ran["device"]) == (2, "gloo", "cpu")
            kept = ("distributed_type", "parameter", "stage", "partitioned")
            assert tuple(ran[key] for key in kept) == RAN[strategy] and ran["wrapper"].startswith(WRAPPERS[strategy])
            assert logged(run, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5), name
            assert logged(run, "grad_norm") == pytest.approx(logged(one, "grad_norm"), rel=1e-4), name
            for metric in metrics:
                assert logged(run, metric) == pytest.approx(logged(one, metric), rel=1e-4), (name, metric)
        read = weights if options["kind"] == "draft" else stored  # a tied one is saved by other names
        saved, expected = (read(path / name) for path in (output, alone[1]))
        assert furthest(saved, expected) < 4 * LAST_BITS, name  # Muon makes more of them without vector instructions
        names = {path.name for path in (output / name).iterdir()}
        assert not [each for each in names if "pytorch_model" in each or "partial" in each]
        if options["kind"] == "draft":
            assert names >= ORDINARY
            again = AutoTokenizer.from_pretrained(output / name)("def f(x): return x")["input_ids"]
            assert again == tokenizer("def f(x): return x")["input_ids"]
        if options["kind"] == "medusa":  # read by this process, those that were trained
            logits = head_logits(output / name)
            assert logits[logits.isfinite()].std() > 0.01  # no empty tensors; heads of a random target begin quiet
            torch.testing.assert_close(found[0][name]["logits"], logits, atol=1e-6, rtol=1e-6)
        if "backbone" in options:
            backbones = [weights(path / name / "backbone") for path in (output, alone[1])]
            assert furthest(*backbones) < LAST_BITS


@under(*EVERY)
def test_the_best_checkpoint_is_loaded_and_saved(alone, together):
    """Completions have 3 to 12 tokens; of five held-out samples the sixth, that fills a batch, must not count."""
    _, found, output = together
    first, second = ([sum(map(len, part)) for part in rank["draft, best"]["texts"]] for rank in found)
    assert sum(a != b for a, b in zip(first, second, strict=True)) >= 3
    for rank in found:
        assert rank["draft, best"]["best"] == str(output / "draft, best" / "checkpoint-2")
    best = alone[1] / "draft, best"
    assert furthest(weights(best), weights(best / "checkpoint-2")) == 0
    assert KeptStep.left_in(output / "draft, best").step == 2
    assert json.loads((output / "draft, best" / "draftsmith.json").read_text())["config"]["temperature"] == 0.9


@under(*WHOLLY)
def test_layers_are_computed_twice_and_half_of_the_target_is_held(alone, together):
    _, found, _ = together
    assert alone[0]["draft, split"]["layers"] == [1] * 2
    for rank in found:
        assert rank["draft, split"]["layers"] == [2] * 2 * 2
        assert rank["draft, split"]["target"] == ("DTensor", 0.5)
        assert rank["draft, best"]["target"] == ("Parameter", 1.0)


@under(*SHARDED)
def test_a_carved_draft_keeps_the_targets_embeddings_and_its_adapters_are_merged(ground, together, tokenizer):
    *_, output = together
    target, draft = weights(ground / "padded"), weights(output / "draft, carved")
    rows = len(tokenizer)
    assert torch.equal(draft["model.embed_tokens.weight"][:rows], target["model.embed_tokens.weight"][:rows])
    scales = draft["model.norm.weight"] / target["model.norm.weight"]  # one for all, as the texts asked for
    assert scales[0] in SCALES and (scales == scales[0]).all()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert 0 < (draft[name] - target[name]).abs().max() < 0.2


@under("fsdp2")
def test_half_precision_keeps_to_the_loss_and_to_its_dtypes(alone, together):
    """bfloat16 has 8 bits: 0.4 % a number, and less in a mean of many. Drafts are saved in the dtype they came in."""
    _, found, output = together
    assert {part.dtype for part in load_file(output / "draft, bfloat16" / "model.safetensors").values()} == {
        torch.float32
    }
    kept, saved = (
        {part.dtype for part in load_file(output / "joint, bfloat16" / name / "model.safetensors").values()}
        for name in ("checkpoint-2", "backbone")
    )
    assert (kept, saved) == ({torch.float32}, {torch.bfloat16})  # adapters, and what they are merged into
    for rank in found:
        half, whole = logged(rank["draft, bfloat16"], "loss"), logged(alone[0]["draft, best"], "loss")
        assert half == pytest.approx(whole, rel=0.01) and half != pytest.approx(whole, rel=1e-5)
        assert set(rank["draft, bfloat16"]["losses"]) == {"torch.float32"}  # of which FSDP2's policy would keep 8 bits
        expected = logged(alone[0]["joint, adapters"], "loss")  # three significant digits
        assert logged(rank["joint, bfloat16"], "loss") == pytest.approx(expected, rel=0.02)


@under(*SHARDED)
def test_each_rank_writes_its_own_texts(together):
    """From one and the same prompt; they end at different lengths, which would hang ranks that wait for each other."""
    _, found, _ = together
    first, second = (rank["draft, own texts"]["texts"] for rank in found)
    assert len(first) == len(second) == 2
    for one, two in zip(first, second, strict=True):
        assert not {tuple(text) for text in one} & {tuple(text) for text in two}
    longest = [[max(map(len, texts)) for texts in rank] for rank in (first, second)]
    assert longest[0] != longest[1]
    assert logged(found[0]["draft, own texts"], "loss") == logged(found[1]["draft, own texts"], "loss")


@under(*WHOLLY)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(ground, together, tmp_path):
    """From a checkpoint in the second epoch, in new processes: the same texts and, bit for bit, the same losses."""
    strategy, found, output = together
    runs = {name: run for name, run in planned(ground, strategy).items() if name in RESUMED}
    for name, run in runs.items():
        checkpoint = output / name / "checkpoint-3"
        assert 1 < json.loads((checkpoint / "trainer_state.json").read_text())["epoch"] < 2
        run["resumes"] = str(checkpoint)
    resumed = forked(trained, ground, tmp_path, runs, strategy=strategy)
    for name in runs:
        for whole, rest in zip(found, resumed, strict=True):
            assert rest[name]["texts"] == whole[name]["texts"][3:]
            assert logged(rest[name], "loss") == logged(whole[name], "loss")
        assert furthest(stored(output / name), stored(tmp_path / name)) == 0


FSDP1 = ("--use_fsdp", "--fsdp_cpu_ram_efficient_loading", "false", "--fsdp_sync_module_states", "false")
FSDP2 = ("--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("fsdp2", shipped("fsdp2")),
        ("zero2", shipped("zero2")),  # its sizes are "auto": the backbone's config says how many
        ("fsdp2", FSDP2),  # its checkpoints are in shards, by default
        ("zero3", ("--use_deepspeed", "--zero_stage", "3", "--zero3_init_flag", "true")),  # saves none, by default
    ],
    ids=["fsdp2", "zero2", "fsdp2-defaults", "zero3-defaults"],
)
def test_what_accelerate_launch_asks_for_is_done(ground, alone, tmp_path, strategy, flags):
    """Sharding by the launcher alone, of which the config knows nothing; the draft is saved whole all the same."""
    launch = launch_environment(*flags)
    saved = {"training": {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}}
    runs = {"draft": {"kind": "draft", **saved}}
    if strategy == "zero2":
        runs["joint"] = placed(ground, RUNS["joint, adapters"][1])
    ranks = forked(trained, ground, tmp_path, runs, True, strategy=strategy, launch=launch)
    for rank in ranks:
        ran = rank["draft"]["ran"]
        assert ran["num_processes"] == 2 and (ran["distributed_type"], ran["parameter"]) == RAN[strategy][:2]
        # The file of FSDP2 asks for bfloat16, which has 8 bits.
        close = 0.01 if launch["ACCELERATE_MIXED_PRECISION"] == "bf16" else 1e-5
        assert (close == 0.01) == (flags == shipped("fsdp2"))
        expected = logged(alone[0]["draft, best"], "loss")[:3]
        assert logged(rank["draft"], "loss") == pytest.approx(expected, rel=close)
        if "joint" in runs:
            expected = logged(alone[0]["joint, adapters"], "loss")
            assert logged(rank["joint"], "loss") == pytest.approx(expected, rel=1e-5)
    found = weights(tmp_path / "draft")
    assert furthest(found, weights(ground / "draft")) > 1e-3
    if flags == FSDP2:
        options = runs["draft"] | {"resumes": str(tmp_path / "draft" / "checkpoint-2")}
        resumed = forked(trained, ground, tmp_path, {"again": options}, True, strategy=strategy, launch=launch)
        assert logged(resumed[0]["again"], "loss") == logged(ranks[0]["draft"], "loss")
        assert furthest(found, weights(tmp_path / "again")) == 0


def test_the_command_really_launches_two_processes(ground, alone, tmp_path):
    """On the CPU accelerate falls back to one without an error."""
    said, out, file = (tmp_path / name for name in ("said", "out", "run.yaml"))
    training = {"output_dir": str(out), "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 3e-3}
    training |= {"lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "steps", "save_steps": 2}
    training |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    fields = {name: str(ground / name) for name in ("target", "draft")} | {"temperature": 0.9, "any_target": True}
    fields["completions"] = [str(ground / name) for name in ("short", "long")]
    file.write_text(json.dumps(fields | {"training": training}))

    def work() -> None:
        for stream in (1, 2):
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os.environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        launcher = ["--accelerate-config", str(ROOT / "configs/accelerate/cpu-2.yaml"), "--main_process_port", "0"]
        os._exit(cli.main(["distill", *launcher, "--config", str(file)]))

    assert exit_code(work) == 0, said.read_text()[-3000:]
    assert json.loads((out / "checkpoint-2" / "job.json").read_text())["processes"] == 2
    log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    assert logged({"log": log}, "loss") == pytest.approx(logged(alone[0]["draft, best"], "loss")[:2], rel=1e-5)


@pytest.mark.parametrize(
    ("strategy", "flags", "options", "named"),
    [
        ("fsdp2", FSDP2, {"kind": "draft", "optimizer": "muon"}, "optimizer: expected trainer"),
        ("fsdp2", FSDP1, {"kind": "draft"}, "fsdp_version: expected 2, found 1"),
        ("one", (), {"kind": "draft", "target_sharded": True}, "target_sharded: expected more than one process"),
        ("zero2", (), {"kind": "medusa", "backbone": "lora", "warmup_heads": 0.5}, "warmup_heads: expected 0"),
        ("ddp", (), {"kind": "medusa", "hydra": True, "target_sharded": True}, "target_sharded: expected false"),
    ],
)
def test_what_cannot_be_sharded_is_refused(ground, tmp_path, strategy, flags, options, named):
    launch = launch_environment(*flags) if flags else None
    with pytest.raises(AssertionError, match=f"InputError: {named}"):
        forked(trained, ground, tmp_path, {"run": options}, bool(flags), strategy=strategy, launch=launch)


def test_a_process_has_no_more_of_a_sharded_target_than_its_share_in_memory(ground, tmp_path, tokenizer):
    shape = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 7, "num_attention_heads": 4}
    shape |= {"vocab_size": len(tokenizer), "tie_word_embeddings": True, "max_position_embeddings": 512}
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
    with pytest.raises(InputError, match="target_sharded: expected false with target_quantization"):
        configured(ground, tmp_path, target_sharded=True, target_quantization="4bit")
