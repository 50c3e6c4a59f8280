"""The `draftsmith` command: a table of commands that are imported on demand, so that `--help` need not load torch."""

import argparse
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

from draftsmith.decode.errors import InputError, first_line
from draftsmith.scripts.kinds import recipes
from draftsmith.train.cli import INTERRUPTED, check_fields, flags, nearest, parse_config, run
from draftsmith.train.job.ranks import killed_message

ROAD: dict[str, dict[str, tuple[str, str]]] = {
    "start here": {
        "quickstart": (
            "runs every stage on the embedded models, in minutes on a laptop CPU",
            "configs:QuickstartConfig",
        ),
        "align": ("goes all the way: chooses a drafter, trains, measures and exports it", "choose.config:AlignConfig"),
    },
    "prepare": {
        "prepare": ("lets the target complete prompts", "train.data.prepare_config:PrepareConfig"),
        "cache": (
            "stores the target's distributions or features, to train without the target in memory",
            "train.teacher.cache_config:CacheConfig",
        ),
    },
    "train": {
        "plan": (
            "computes whether a training run will fit its GPUs, and how long it takes; needs no weights and no GPU",
            "train.memory.machines:Machines",
        )
    },
    "measure": {
        "measure": (
            "measures acceptance, speed-up and costs of drafters, or of a running server, and gives the verdict",
            "measure.server.config:measure_config",
        ),
        "certify": ("tests whether a server writes what its target would", "engines.certify.config:CertifyConfig"),
    },
    "choose": {
        "choose": (
            "finds out which drafter to train for a target, by training several a little",
            "choose.config:ChooseConfig",
        ),
        "tune": (
            "compares the speed of lossy rules with their departure from the target; finds γ by load",
            "tune.config:tune_config",
        ),
        "tree": ("finds the tree that a drafter should draft, on text of the target", "configs:TreeConfig"),
    },
    "deploy": {
        "export": ("writes other formats, and launch lines for servers", "configs:ExportConfig"),
        "serve-draft": (
            "serves a draft model to decoders in other processes, such as vLLM",
            "services.serve_draft.config:ServeDraftConfig",
        ),
        "coordinate": (
            "is one door to several servers, and chooses among them for each request",
            "services.coordinate.config:CoordinatorConfig",
        ),
        "adapt": (
            "lets a deployed drafter learn from logged requests, and replaces it by a better one",
            "adapt.config:AdaptConfig",
        ),
    },
    "look inside": {
        "doctor": (
            "checks whether a pair will work, and shows which tokens of your samples count in the loss",
            "doctor.config:DoctorConfig",
        ),
        "generate": (
            "decodes one prompt in the terminal, with a colour for how each token came about",
            "configs:GenerateConfig",
        ),
        "profile": ("shows where the time of a round goes, as a table and a trace", "configs:ProfileConfig"),
    },
}
"""The stages of the road, and their commands: what each does, and where its config is. Recipes are in `train`."""
COMMANDS = {name: command for stage in ROAD.values() for name, command in stage.items()}
MODULES = {"align": "choose.align", "export": "engines.export", "measure": "measure.command"}
"""Commands whose module's name follows neither from their own nor from their config's package."""
LAUNCHER = ["-m", "accelerate.commands.launch"]
MACHINES = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")
"""Flags of `accelerate launch` for one of several machines."""
VERSIONS = ("draftsmith", "torch", "transformers")
NO_FILE = "<N/A>"
"""The error file of a process without a message, as torch's launcher writes it."""
USAGE = """usage: draftsmith COMMAND [--config FILE.yaml] [--FIELD VALUE …]

{commands}

draftsmith COMMAND --help explains a command's fields; draftsmith --version prints versions."""
LAUNCH_USAGE = """draftsmith {name} starts `accelerate launch` with
  --processes N              N processes, one for each GPU; by default as accelerate is configured
  --accelerate-config FILE   a config file for accelerate, such as configs/accelerate/fsdp2.yaml
  --num-machines N, --machine-rank I, --main-process-ip HOST, --main-process-port PORT
                             for several machines: start the same line on each, with its own rank
All other flags are the command's own:
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 bad input; our own failures raise."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        texts = (
            "\n".join([stage, *(f"  {name:<16}{summary}" for name, summary in commands.items())])
            for stage, commands in summaries_by_stage().items()
        )
        return run(lambda: print(USAGE.format(commands="\n\n".join(texts))))
    if arguments[0] in ("-V", "--version", "version"):
        return run(lambda: print(", ".join(f"{name} {version(name)}" for name in VERSIONS)))
    name, *rest = arguments
    if name not in summaries():
        line = f"error: expected a command out of {', '.join(summaries())}, found {name!r}"
        print(line + nearest(name, summaries()), file=sys.stderr)
        return 2
    if {"-h", "--help"} & set(rest):
        if name in launched_commands():
            print(LAUNCH_USAGE.format(name=name))
        return run(lambda: parse_config(config_class(name, rest), rest, prog=f"draftsmith {name}"))
    if name in launched_commands():
        return run(lambda: _launch(name, rest))
    package, found, _ = COMMANDS[name][1].partition(".config:")
    module = MODULES.get(name, f"{package}.command" if found else name.replace("-", "_"))

    def command() -> int:
        if name != "plan":  # it divides its flags from those of the planned command
            parse_config(config_class(name, rest), rest)  # report mistakes before seconds of imports
        code: int = import_module(f"draftsmith.scripts.{module}").main(rest)
        return code

    return run(command)


def summaries() -> dict[str, str]:
    """Return what each command does, in the order of the road."""
    return {name: summary for commands in summaries_by_stage().values() for name, summary in commands.items()}


def summaries_by_stage() -> dict[str, dict[str, str]]:
    """Return what each command does, by the stage of the road; the recipes' commands train."""
    training = {"train": {name: recipe.summary for name, recipe in recipes().items()}}
    return {
        stage: training.get(stage, {}) | {name: summary for name, (summary, _) in commands.items()}
        for stage, commands in ROAD.items()
    }


def launched_commands() -> dict[str, str]:
    """Return the modules of the commands that `accelerate launch` starts on several processes."""
    modules = {name: f"draftsmith.scripts.{name}" for name in ("prepare", "cache")}
    return modules | {name: recipe.package for name, recipe in recipes().items()}


def config_class(name: str, arguments: Sequence[str] = ()) -> type[Any]:
    """Return the dataclass of a command's fields; of `plan` and `measure` it depends on the arguments."""
    if name in recipes():
        return recipes()[name].config_class()
    module, _, cls = COMMANDS[name][1].partition(":")
    home = "" if module.startswith("train.") else "scripts."
    config: Any = getattr(import_module(f"draftsmith.{home}{module}"), cls)
    return config if isinstance(config, type) else config(arguments)  # type: ignore[no-any-return]


def launch_command(name: str, arguments: Sequence[str], alone: bool = False) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a run, and its additions to the environment.

    Without accelerate's own configuration and with at most one GPU, it runs in one process, as also with `alone`,
    unless `arguments` ask for more. Raise InputError for a bad number of processes or a missing file.
    """
    import torch
    from accelerate.commands.config.config_args import default_config_file

    launcher, rest = launcher_flags(arguments)
    file, processes = launcher.accelerate_config, launcher.processes
    recipe = ["-m", launched_commands()[name], *rest]
    if alone and file is None and processes is None:
        return [sys.executable, *recipe], {}
    num_gpus = torch.cuda.device_count()
    if file is None and not os.path.isfile(default_config_file):
        count = processes or max(num_gpus, 1)
        if count == 1:
            return [sys.executable, *recipe], {}
        # Accelerate's own defaults, given so that it does not warn; CPUs need the variable as well.
        options = ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // count, 1)))}
        environment = {} if num_gpus else {"ACCELERATE_USE_CPU": "true"} | threads
    else:
        count, environment = processes or 0, {}
        options = [] if file is None else ["--config_file", file]
    options += ["--num_processes", str(count)] if count else []
    options += [f"--{name}={value}" for name in MACHINES if (value := getattr(launcher, name)) is not None]
    return [sys.executable, *LAUNCHER, *options, *recipe], environment


def _launch(name: str, arguments: Sequence[str]) -> int:
    (_, command_flags), alone = launcher_flags(arguments), False
    # Report mistakes in the fields once, and before seconds of imports.
    if name in recipes():
        check_fields(config_class(name), command_flags)
    else:
        alone = parse_config(config_class(name), command_flags).alone
    command, environment = launch_command(name, arguments, alone)
    if command[1:3] == LAUNCHER:
        os.environ |= environment
        return _launched(command[3:])
    code: int | None = import_module(command[2] + (".__main__" if name in recipes() else "")).main(command_flags)
    return code or 0


def _launched(arguments: Sequence[str]) -> int:
    """Run `accelerate launch`, without its traceback and without torch's table of processes.

    Return the exit code of the process that failed first, or 0; print a line and return 1 if a signal ended it.
    """
    from accelerate.commands.launch import launch_command as accelerate_launch
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for module in ("multiprocessing.api", "agent.server.api"):  # they log which processes they end, and why
        logging.getLogger(f"torch.distributed.elastic.{module}").disabled = True
    try:
        accelerate_launch(launch_command_parser().parse_args(arguments))
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].error_file == NO_FILE)
        if failures[0][1].error_file == NO_FILE:  # no process left a message
            for rank, failure in failures:
                if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:  # the launcher ends the others so
                    print(killed_message(f"rank {rank}", f" by {failure.signal_name()}"), file=sys.stderr)
                    return 1
        return next((failure.exitcode for _, failure in failures if failure.exitcode > 0), 1)
    except subprocess.CalledProcessError as error:
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    except SignalException as error:
        return 128 + error.sigval
    except KeyboardInterrupt:  # the run itself printed what it kept
        return INTERRUPTED
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise InputError(
            f"accelerate_config: expected what accelerate can launch, found: {first_line(error)}"
        ) from error
    return 0


def launcher_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the launcher's flags from the others; raise InputError for bad ones."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--processes", type=int)
    for name in ("accelerate_config", *MACHINES):
        parser.add_argument(f"--{name}")
    try:
        launcher, rest = parser.parse_known_args(flags(arguments))
    except argparse.ArgumentError as error:
        raise InputError(f"{error}") from error
    if launcher.processes is not None and launcher.processes < 1:
        raise InputError(f"processes: expected at least 1, found {launcher.processes}")
    if launcher.accelerate_config is not None and not os.path.isfile(launcher.accelerate_config):
        raise InputError(f"accelerate_config: expected a file, found none at {launcher.accelerate_config}")
    return launcher, rest


if __name__ == "__main__":
    sys.exit(main())
