"""Real processes over gloo on the CPU, forked from one that has imported everything: 2 s where a launch takes 15.

On the CPU accelerate starts one process, or plain DDP, whatever it is asked for. The ways into FSDP2 and DeepSpeed here
are for tests alone; what they lead to is what runs on GPUs. `witness` says what did run.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
SECONDS = 300
"""What a job may take, on a busy machine, before it counts as hung."""

# The second has a `torch.compile` at its top, which every rank would wait for; each would import the next three. The
# last keeps the garbage collector off all that was imported.
PRELOADED = ["deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.ops.op_builder.all_ops"]
PRELOADED += ["deepspeed.runtime.superoffload.superoffload_stage3", "torch.distributed.checkpoint.state_dict"]
PRELOADED += ["process_jobs"]
ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).parent),
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
}


def exit_code(work: Callable[[], Any]) -> int:
    """Run in a fork of this process, and return its exit code (negative: the signal that ended it)."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(SECONDS)
    assert process.exitcode is not None
    return process.exitcode


def forked(job: Callable[..., Any], *args: Any, strategy: str, launch: dict[str, str] | None = None) -> list[Any]:
    """Run `job(*args)` in two processes under a strategy, or in one under "one"; return what each returned.

    They are forked from a server that never ran a backward pass, as pytest's process has: autograd forbids it then.

    Args:
        job: of a module that the ranks can import.
        args: its arguments.
        strategy: "one" or one of `STRATEGIES`.
        launch: environment variables that `accelerate launch` would set.
    """
    _serve_forks()
    count = 1 if strategy == "one" else 2
    with tempfile.TemporaryDirectory() as name:
        meeting = Path(name)
        args = (count, strategy, launch or {}, meeting, job, args)
        processes = start_processes(_rank, args, count, join=False, start_method="forkserver")
        end = time.monotonic() + SECONDS
        try:
            while not processes.join(timeout=5):
                if time.monotonic() > end:
                    for process in processes.processes:
                        process.kill()
                    raise TimeoutError(f"not done after {SECONDS} s")
        except (ProcessRaisedException, ProcessExitedException, TimeoutError) as error:
            said = "".join(f"\nrank {path.stem}: {path.read_text()[-1500:]}" for path in sorted(meeting.glob("*.log")))
            raise AssertionError(f"{job.__name__}{args[5]} under {strategy}: {error}{said}") from None
        return [torch.load(meeting / f"{rank}.pt", weights_only=False) for rank in range(count)]


def ended(job: Callable[..., int], *args: Any, strategy: str = "ddp") -> list[tuple[int, str]]:
    """Run `job(*args)`, a command that returns its exit code, in two processes that were launched with a strategy.

    Returns:
        How each ended: its exit code (negative: the signal that ended it), and what it said.
    """
    _serve_forks()
    with tempfile.TemporaryDirectory() as name:
        args = (2, strategy, launch_environment(*shipped(strategy)), Path(name), job, args)
        context = start_processes(_left, args, 2, join=False, start_method="forkserver")
        end = time.monotonic() + SECONDS
        for process in context.processes:
            process.join(max(0, end - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        return [
            (process.exitcode, (Path(name) / f"{rank}.log").read_text())
            for rank, process in enumerate(context.processes)
        ]


def _left(rank: int, *args: Any) -> None:
    os._exit(_rank(rank, *args))


def _serve_forks() -> None:
    """Start the process that ranks are forked from."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE", "FSDP"))}
    with mock.patch.dict(os.environ, clean | ENVIRONMENT, clear=True):
        multiprocessing.forkserver.ensure_running()


def _rank(rank: int, count: int, strategy: str, launch: dict[str, str], meeting: Path, job: Any, args: Any) -> Any:
    log = os.open(meeting / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # loaders start processes as those of a launched rank do
    os.environ |= launch
    if count > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ |= {name: str(value) for name, value in places.items()}
        torch.distributed.init_process_group(
            "gloo", f"file://{meeting}/store", timedelta(seconds=SECONDS), world_size=count, rank=rank
        )
    found = job(strategy, *args)
    torch.save(found, meeting / f"{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return found


def launch_environment(*flags: str) -> dict[str, str]:
    """Return what `accelerate launch` with these flags would set in the environment of two ranks."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    common = ["--num_processes", "2", "--num_machines", "1", "--dynamo_backend", "no", "--main_process_port", "0"]
    precision = [] if "--config_file" in flags else ["--mixed_precision", "no"]  # a file says which
    arguments = launch_command_parser().parse_args([*flags, *common, *precision, "-m", "none"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    fields = (defaults and defaults.deepspeed_config) or {}
    arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
    made = prepare_deepspeed_cmd_env(arguments)[1] if arguments.use_deepspeed else prepare_multi_gpu_env(arguments)
    return {name: value for name, value in made.items() if name.startswith(("ACCELERATE", "FSDP"))}


def shipped(name: str) -> tuple[str, ...]:
    """Return the flags of `accelerate launch` for a launcher's file that the project ships."""
    configs = Path(__file__).parents[2] / "configs"
    flags = ("--config_file", str(configs / "accelerate" / f"{name}.yaml"))
    if name.startswith("zero"):
        flags += ("--deepspeed_config_file", str(configs / "deepspeed" / f"{name}.json"))
    return flags


def enter(strategy: str, launched: bool = False) -> dict[str, Any]:
    """Prepare a rank for one run under a strategy.

    Returns:
        The `TrainingArguments` that ask for it; fewer of them where the environment does, as after a launch.
    """
    from accelerate import PartialState
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if strategy == "one":
        return {}
    training: dict[str, Any] = {"accelerator_config": {"use_configured_state": True}, "ddp_backend": "gloo"}
    if strategy == "ddp":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        PartialState(cpu=True)
        return training
    if strategy == "fsdp2":
        PartialState(backend="gloo")
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        options = {"version": 2, "state_dict_type": "FULL_STATE_DICT"}
        return training if launched else training | {"fsdp": True, "fsdp_config": options}
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    if launched:
        return training
    zero: dict[str, Any] = {"stage": int(strategy[-1])}
    if strategy == "zero3":
        zero["stage3_param_persistence_threshold"] = 0  # tiny weights would all stay whole
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    options = dict.fromkeys(names, "auto") | {"bf16": {"enabled": "auto"}, "zero_optimization": zero}
    return training | {"deepspeed": options | {"zero_allow_untested_optimizer": True}}


def witness(trainer: Any) -> dict[str, Any]:
    """Say what a trainer ran on."""
    state, model = trainer.accelerator.state, trainer.model_wrapped
    parameter = next(trainer.accelerator.unwrap_model(model).parameters())
    deepspeed = state.distributed_type.value == "DEEPSPEED"
    return {
        "distributed_type": state.distributed_type.value,
        "num_processes": state.num_processes,
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "device": trainer.args.device.type,
        "wrapper": type(model).__name__,
        "parameter": type(parameter).__name__,
        "stage": model.zero_optimization_stage() if deepspeed else None,
        "partitioned": hasattr(parameter, "ds_id"),
    }
