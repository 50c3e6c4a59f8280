"""The shipped configs for real pairs and launchers: they parse, train, and launch."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from pipelines import history, weights
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from draftsmith.distill import __main__ as command
from draftsmith.distill.config import DistillConfig
from draftsmith.scripts import cli
from draftsmith.scripts.measure.server.config import MeasureServerConfig
from draftsmith.scripts.plan import planned_run
from draftsmith.train.cli import flags_of, parse_config
from draftsmith.train.data.generate import PrepareConfig, prepare
from draftsmith.train.runs import save_model

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
SHAPES = ROOT / "tests" / "golden" / "configs"
PAIRS = {
    "qwen3-8b-to-0.6b": ("qwen3-8b", "qwen3-0.6b"),
    "qwen3-8b-to-0.6b-parallel": ("qwen3-8b", "qwen3-0.6b"),
    "llama-3.1-8b-to-1b": ("llama-3.1-8b", "llama-3.2-1b"),
    "llama-3.1-8b-carved": ("llama-3.1-8b", None),
    "pythia-6.9b-to-160m": ("pythia-6.9b", "pythia-160m"),
    "gpt2-to-distilgpt2": ("gpt2", "distilgpt2"),
}
# Without a GPU, bf16 asks for this.
ON_CPU = ["--training.use_cpu", "true"]
STAGES = (1, 2, 3)


def distill_file(name: str) -> Path:
    return CONFIGS / "distill" / f"{name}.yaml"


def test_each_pair_is_tested():
    assert {path.stem for path in (CONFIGS / "distill").glob("*.yaml")} - {"tiny", "tiny-parallel"} == set(PAIRS)


@pytest.mark.parametrize("name", PAIRS)
def test_it_parses_as_what_it_says(name):
    config = parse_config(DistillConfig, ["--config", str(distill_file(name)), *ON_CPU])
    training = config.training
    assert training.bf16 and training.activation_checkpointing
    assert training.load_best_model_at_end and training.metric_for_best_model == "mean_acceptance_length"
    assert (config.draft is None) == (config.init.layers is not None) == (PAIRS[name][1] is None)
    assert config.heldout and not set(config.heldout) & set(config.completions)
    assert f"-m draftsmith.distill --config configs/distill/{name}.yaml" in distill_file(name).read_text()


def test_a_plan_takes_its_strategy_from_the_deepspeed_file():
    pytest.importorskip("deepspeed")
    zero2 = ["--training.deepspeed", str(CONFIGS / "deepspeed" / "zero2.json")]
    config = ["--config", str(distill_file("gpt2-to-distilgpt2"))]
    for role, shape in (("target", "gpt2"), ("draft", "distilgpt2")):
        config += [f"--{role}", str(SHAPES / f"{shape}.json")]
    environment = dict(os.environ)
    try:
        recipe, *run = planned_run(["distill", *config, *zero2, "--gpus", "8"])
        plan = recipe.memory_plan(*run)
    finally:  # DeepSpeed's settings outlive the arguments that name them
        unset_hf_deepspeed_config()
        os.environ.clear()
        os.environ.update(environment)
    assert (plan.strategy, plan.precision) == ("zero2", "half")


def shrunken(name: str, vocab_size: int, layers: int):
    """A model of the same family, with its tying and its ratio of heads, and random weights."""
    config = AutoConfig.from_pretrained(SHAPES / f"{name}.json")
    shared = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    changes = {"vocab_size": vocab_size, "num_hidden_layers": layers, "hidden_size": 32, "num_attention_heads": 4}
    changes |= {"intermediate_size": 64, "num_key_value_heads": 4 // shared, "head_dim": 8, "layer_types": None}
    for field, value in changes.items():
        field = config.attribute_map.get(field, field)
        if hasattr(config, field):
            setattr(config, field, value)
    for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, field, None)
    config = type(config).from_dict(config.to_dict())
    torch.manual_seed(layers)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.get_output_embeddings().parameters():
            parameter.mul_(6.0)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-8b-to-0.6b-parallel", "llama-3.1-8b-carved", "pythia-6.9b-to-160m"])
def test_a_shrunken_pair_trains(name, tokenizer, tmp_path):
    """All of the config but the sizes: two steps in bfloat16 with checkpointing, measured, the better one kept."""
    target_shape, draft_shape = PAIRS[name]
    rows = {"target": len(tokenizer), "draft": len(tokenizer)}
    if name.startswith("pythia"):  # padded to different sizes, as the real ones are
        rows = {"target": len(tokenizer) + 20, "draft": len(tokenizer) + 4}
    for role, shape, layers in (("target", target_shape, 8), ("draft", draft_shape, 1)):
        if shape is not None:
            model = shrunken(shape, rows[role], layers)
            model.generation_config.eos_token_id = tokenizer.eos_token_id
            model.generation_config.pad_token_id = tokenizer.pad_token_id
            save_model(model, tokenizer, tmp_path / role)
    prompts = {"train": ["def f(x):", "import os", "print(x)", "return x"], "heldout": ["class A:", "while True:"]}
    for part, lines in prompts.items():
        (tmp_path / f"{part}.txt").write_text("\n".join(lines))
        prepare(
            PrepareConfig(
                str(tmp_path / "target"), str(tmp_path / f"{part}.txt"), str(tmp_path / part), max_new_tokens=8
            )
        )
    argv = ["--config", str(distill_file(name)), *ON_CPU, "--target", str(tmp_path / "target")]
    argv += ["--completions", f"[{tmp_path / 'train'}]", "--heldout", f"[{tmp_path / 'heldout'}]"]
    if draft_shape is not None:
        argv += ["--draft", str(tmp_path / "draft")]
    options = {"output_dir": tmp_path / "out", "per_device_train_batch_size": 2, "max_steps": 2, "eval_steps": 1}
    options |= {"save_steps": 1, "logging_steps": 1, "report_to": "none", "disable_tqdm": "true"}
    argv += flags_of({f"training.{name}": value for name, value in options.items()})
    trainer = command.distill(parse_config(DistillConfig, argv))

    assert len(history(trainer, "loss")) == 2 and all(value > 0 for value in history(trainer, "loss"))
    assert trainer.model.is_gradient_checkpointing
    lengths = history(trainer, "eval_mean_acceptance_length")
    assert len(lengths) == 3 and trainer.state.best_metric == max(lengths[1:])
    saved = AutoConfig.from_pretrained(tmp_path / "out")
    assert saved.vocab_size == rows["target"]
    assert saved.num_hidden_layers == (4 if draft_shape is None else 1)
    assert all(torch.isfinite(value).all() for value in weights(tmp_path / "out").values())


def launched(name: str, monkeypatch):
    """What `accelerate launch` makes of a config, without starting anything."""
    argv = ["--config_file", str(CONFIGS / "accelerate" / f"{name}.yaml"), "-m", "draftsmith.distill"]
    for variable in list(os.environ):
        if variable.startswith(("ACCELERATE_", "FSDP_")):
            monkeypatch.delenv(variable)
    parser = launch_command_parser()
    args = parser.parse_args(argv)
    args.nondefault = set()
    args, defaults, from_file = _validate_launch_command(args)
    fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_file else [])]
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)  # as `launch_command` goes on
    return args, {action.dest for action in parser._actions}


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIGS / "accelerate").glob("*.yaml")))
def test_accelerate_knows_all_keys(name, monkeypatch):
    path = CONFIGS / "accelerate" / f"{name}.yaml"
    config = load_config_from_file(str(path))  # refuses unknown keys, but not those of inner sections
    _, known = launched(name, monkeypatch)
    assert set(config.fsdp_config or {}) | set(config.deepspeed_config or {}) <= known
    assert (config.num_machines, config.num_processes) == {"cpu-2": (1, 2), "nodes": (8, 64)}.get(name, (1, 8))
    assert f"--config_file configs/accelerate/{name}.yaml" in path.read_text()


@pytest.mark.parametrize("path", sorted((CONFIGS / "measure").glob("*.yaml")), ids=lambda path: path.stem)
def test_measurements_parse(path):
    flags = ["--config", str(path)]
    config = parse_config(cli.config_class("measure", flags), flags)
    if path.stem == "server":
        assert isinstance(config, MeasureServerConfig) and config.baseline_server
    else:
        assert path.stem == "tiny" or (config.baseline_draft and config.min_speedup)


def under_slurm(tmp_path, call: list[str], machines: int, curl: str = "", **environment: str) -> list[list[str]]:
    """The words that each command was called with, by stand-ins for SLURM, the servers and the command."""
    for name, text in {
        "scontrol": f"seq -f node-%g 1 {machines}",
        "srun": """
            while [[ $1 == --* ]]; do [[ $1 == --nodes=* ]] && nodes=${1#*=}; shift; done
            for ((SLURM_NODEID = 0; SLURM_NODEID < nodes; SLURM_NODEID++)); do export SLURM_NODEID; "$@"; done""",
        "curl": curl or f"until (( $(wc -l < {tmp_path}/servers) == 2 )); do sleep 0.01; done",
        "vllm": f"""python3 -c 'import json, os, sys; print(json.dumps(sys.argv[1:]))' \\
            "$CUDA_VISIBLE_DEVICES" "$@" >> {tmp_path}/servers""",
        "nvidia-smi": "seq 0 3",
        "draftsmith": 'printf "%s\\n" "$@" end',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node-[1-9]", "SLURM_NNODES": str(machines), "SLURM_GPUS_ON_NODE": "4"}
    path, script = f"{tmp_path}:{os.environ['PATH']}", str(CONFIGS / "cluster" / "train.slurm")
    variables = {**os.environ, **job, "PATH": path, "STATES": str(tmp_path / "states"), **environment}
    done = subprocess.run(["bash", script, *call], env=variables, cwd=ROOT, capture_output=True, text=True, check=True)
    return [part.split("\n")[:-1] for part in done.stdout.removesuffix("end\n").split("end\n")]


def test_slurm_starts_a_launcher_on_each_machine(tmp_path):
    config = "configs/distill/qwen3-8b-to-0.6b.yaml"
    machines = under_slurm(tmp_path, ["distill", "--config", config, "--training.learning_rate", "1e-5"], 2)
    assert len(machines) == 2
    for rank, words in enumerate(machines):
        assert words[0] == "distill"
        command, _ = cli.launch_command("distill", words[1:])
        args = launch_command_parser().parse_args(command[3:])
        assert (args.num_machines, args.num_processes, args.machine_rank) == (2, 8, rank)
        assert (args.main_process_ip, args.config_file) == ("node-1", "configs/accelerate/nodes.yaml")
        assert (args.module, args.training_script) == (True, "draftsmith.distill")
        assert args.training_script_args == ["--config", config, "--training.learning_rate", "1e-5"]


def test_slurm_gives_the_first_machines_to_servers_of_states(tmp_path):
    serving = {
        "TEACHERS": "1",
        "GPUS": "2",
        "TARGET": "some/target",
        "LAYERS": "[2, 9]",
        "TEACHER_FLAGS": "--dtype half",
    }
    machines = under_slurm(tmp_path, ["eagle", "--config", "c.yaml"], 3, **serving)
    assert len(machines) == 2
    for rank, words in enumerate(machines):
        command, _ = cli.launch_command("eagle", words[1:])
        args = launch_command_parser().parse_args(command[3:])
        assert (args.num_machines, args.num_processes, args.machine_rank) == (2, 8, rank)
        assert args.main_process_ip == "node-2"
        teacher = "vllm:http://node-1:8000,http://node-1:8001"
        assert args.training_script_args == ["--config", "c.yaml", "--teacher", teacher]
    servers = sorted(map(json.loads, (tmp_path / "servers").read_text().splitlines()))
    for words, devices, port in zip(servers, ("0,1", "2,3"), ("8000", "8001"), strict=True):
        flags = dict(zip(words[3::2], words[4::2], strict=True))
        assert words[:3] == [devices, "serve", "some/target"] and flags["--dtype"] == "half"
        assert (flags["--port"], flags["--tensor-parallel-size"]) == (port, "2")
        extraction, transfer = (json.loads(flags[f"--{name}-config"]) for name in ("speculative", "kv-transfer"))
        assert extraction["draft_model_config"]["hf_config"] == {"eagle_aux_hidden_state_layer_ids": [2, 9]}
        assert transfer["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path / "states" / port)}
        module, _, name = flags["--middleware"].rpartition(".")
        assert transfer["kv_connector_module_path"] == module and name == "StatesMiddleware"


def test_slurm_names_a_server_that_does_not_start(tmp_path):
    serving = {"TEACHERS": "1", "TARGET": "some/target", "LAYERS": "[2, 9]", "TEACHER_WAIT": "-1"}
    with pytest.raises(subprocess.CalledProcessError) as error:
        under_slurm(tmp_path, ["eagle", "--config", "c.yaml"], 3, curl="exit 7", **serving)
    assert "error: no answer from http://node-1:8000 within" in error.value.stderr and not error.value.stdout


@pytest.mark.parametrize(("gpus", "rc"), [("0", 2), ("4", 0), ("5", 2)])
def test_servers_of_states_have_the_gpus_that_are_there(tmp_path, gpus, rc):
    (tmp_path / "vllm").write_text("#!/bin/bash\n")
    (tmp_path / "vllm").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "STATES": str(tmp_path / "states"), "GPUS": gpus}
    call = ["bash", str(CONFIGS / "cluster" / "serve-states.sh"), "some/target", "[2]"]
    variables["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"
    done = subprocess.run(call, env=variables, capture_output=True, text=True, timeout=20)
    assert done.returncode == rc and ("error: GPUS: expected 1 to 4" in done.stderr) == bool(rc)


def test_fsdp2_is_what_is_launched(monkeypatch):
    args, _ = launched("fsdp2", monkeypatch)
    assert args.use_fsdp and not args.use_deepspeed and args.mixed_precision == "bf16"
    for name, value in prepare_multi_gpu_env(args).items():
        if name.startswith("FSDP_"):
            monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert str(plugin.state_dict_type).endswith("FULL_STATE_DICT")
    # The target is wrapped by nothing: it must be loaded by each process.
    assert plugin.cpu_ram_efficient_loading is False and not plugin.activation_checkpointing
    with torch.device("meta"):
        shape = AutoConfig.from_pretrained(SHAPES / "distilgpt2.json")
        plugin.set_auto_wrap_policy(AutoModelForCausalLM.from_config(shape))
    assert {cls.__name__ for cls in plugin.auto_wrap_policy.keywords["transformer_layer_cls"]} == {"GPT2Block"}


@pytest.mark.parametrize("stage", STAGES)
def test_zero_is_what_is_launched(stage, monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.chdir(ROOT)  # where the file in it is looked up from
    args, _ = launched(f"zero{stage}", monkeypatch)
    assert args.use_deepspeed and not args.use_fsdp
    for name, value in prepare_deepspeed_cmd_env(args)[1].items():
        if name.startswith("ACCELERATE_"):
            monkeypatch.setenv(name, value)
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == stage and not plugin.zero3_init_flag
    found = {key: value for key, value in plugin.hf_ds_config.config.items() if key != "steps_per_print"}  # added
    assert found == json.loads((CONFIGS / "deepspeed" / f"zero{stage}.json").read_text())
