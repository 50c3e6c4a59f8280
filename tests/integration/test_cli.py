"""The command line: help that waits for nothing, and how training runs are started."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
from accelerate.commands.config import config_args
from accelerate.commands.launch import launch_command_parser

from draftsmith.decode.errors import InputError
from draftsmith.medusa.heads import __main__ as heads_command
from draftsmith.scripts import cli

HELP = """
import io, sys
from contextlib import redirect_stdout
from draftsmith.scripts import cli

for arguments in [["--help"], *([name, "--help"] for name in cli.summaries())]:
    text = io.StringIO()
    with redirect_stdout(text):
        try:
            cli.main(arguments)
        except SystemExit as end:
            assert not end.code, arguments
    assert "usage: draftsmith" in text.getvalue(), arguments
    heavy = {"torch", "transformers", "datasets", "scipy", "matplotlib"} & set(sys.modules)
    assert not heavy, (arguments, heavy)
    if arguments[0] in ("prepare", "distill"):
        assert "The deployment's top-k" in text.getvalue() or "k most likely" in text.getvalue(), arguments
    if arguments[0] == "distill":
        assert "--processes N" in text.getvalue() and "--help training" in text.getvalue()
"""


def test_help_imports_nothing_heavy():
    environment = dict(os.environ, COLUMNS="300")  # no sentence is broken
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr


REFUSAL = """
import sys
from draftsmith.scripts import cli

for name in ("measure", "tune", "profile", "generate", "doctor", "tree", "prepare", "cache", "quickstart",
             "distill", "medusa"):
    assert cli.main([name, "--no_such_field", "1"]) == 2, name
    heavy = {"torch", "transformers", "datasets", "scipy", "matplotlib"} & set(sys.modules)
    assert not heavy, (name, heavy)
"""


def test_a_bad_config_is_refused_before_anything_heavy_is_imported():
    done = subprocess.run([sys.executable, "-c", REFUSAL], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == done.stderr.count("no_such_field") == 11


@pytest.mark.parametrize("argument", ["version", "--version", "-V"])
def test_the_version_is_said_without_importing_anything_heavy(argument, capsys):
    assert cli.main([argument]) == 0
    out = capsys.readouterr().out
    assert (
        out == f"draftsmith {version('draftsmith')}, torch {version('torch')}, transformers {version('transformers')}\n"
    )


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Set how many GPUs there are, and whether accelerate is configured."""
    monkeypatch.delenv("OMP_NUM_THREADS")

    def set_up(gpus: int, configured: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        path = tmp_path / "default_config.yaml"
        if configured:
            path.write_text("")
        monkeypatch.setattr(config_args, "default_config_file", str(path))

    return set_up


@pytest.mark.parametrize(
    ("gpus", "configured", "flags", "launched"),
    [
        (0, False, [], None),
        (1, False, [], None),
        (8, False, ["--processes", "1"], None),
        (2, False, [], ["--multi_gpu", "--num_processes 2"]),
        (0, False, ["--processes=2"], ["--multi_gpu", "--num_processes 2"]),
        (0, True, [], []),
        (8, True, ["--processes", "4"], ["--num_processes 4"]),
    ],
)
def test_a_training_run_is_started_as_the_machine_is(machine, gpus, configured, flags, launched):
    machine(gpus, configured)
    command, environment = cli.launch_command("distill", [*flags, "--config", "c.yaml", "--draft-length", "3"])
    recipe = ["-m", "draftsmith.distill", "--config", "c.yaml", "--draft_length", "3"]
    assert command[0] == sys.executable and command[-len(recipe) :] == recipe
    options = " ".join(command[1 : -len(recipe)])
    if launched is None:
        assert options == "" and environment == {}
    else:
        assert options.startswith("-m accelerate.commands.launch") and all(option in options for option in launched)
        assert ("ACCELERATE_USE_CPU" in environment) == (gpus == 0 and not configured)
        assert ("OMP_NUM_THREADS" in environment) == ("ACCELERATE_USE_CPU" in environment)


def test_a_file_of_accelerates_says_how_many(machine, tmp_path):
    machine(0)
    (tmp_path / "cpu.yaml").write_text("")
    file = str(tmp_path / "cpu.yaml")
    command, _ = cli.launch_command("medusa", ["--accelerate-config", file, "--config", "c.yaml"])
    assert command[1:5] == ["-m", "accelerate.commands.launch", "--config_file", file]
    assert command[5:] == ["-m", "draftsmith.medusa.heads", "--config", "c.yaml"]


def test_several_machines_are_passed_on(machine, tmp_path):
    machine(8)
    (tmp_path / "nodes.yaml").write_text("")
    which = ["--num-machines", "2", "--machine-rank", "1", "--main-process-ip=node-0", "--main-process-port", "29500"]
    file = ["--accelerate-config", str(tmp_path / "nodes.yaml")]
    command, _ = cli.launch_command("distill", [*file, *which, "--processes", "16", "--target", "t"])
    args = launch_command_parser().parse_args(command[3:])
    assert (args.num_machines, args.machine_rank, args.num_processes) == (2, 1, 16)
    assert (args.main_process_ip, args.main_process_port) == ("node-0", 29500)
    assert args.training_script_args == ["--target", "t"]


def test_one_process_runs_here(machine, monkeypatch):
    """So that what interrupts it while it imports is told of in one line too."""
    machine(0)
    begun = []
    monkeypatch.setattr(heads_command, "main", begun.append)
    recipe = ["--target", "t", "--completions", "[c]", "--training.max_steps", "3"]
    assert cli.main(["medusa", "--processes", "1", *recipe]) == 0
    assert begun == [recipe]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--processes", "0"], "processes: expected at least 1, found 0"),
        (["--processes", "two"], "processes: invalid int value: 'two'"),
        (["--accelerate-config", "/nowhere"], "accelerate_config: expected a file, found none at /nowhere"),
    ],
)
def test_bad_flags_are_refused(flags, named):
    with pytest.raises(InputError, match=named):
        cli.launch_command("distill", flags)


def test_bad_input_of_a_recipe_is_one_line_and_exit_code_2(machine, capfd, tmp_path):
    assert cli.main(["no-such-command"]) == 2
    capfd.readouterr()
    machine(0)
    recipe = ["--target", str(tmp_path), "--draft", "d", "--completions", "[c]"]
    assert cli.main(["distill", "--processes", "1", *recipe, "--training.use_cpu", "true"]) == 2
    out, err = capfd.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1
