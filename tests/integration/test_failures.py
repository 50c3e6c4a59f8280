"""How a job of two processes ends when one comes to harm: both at once, with one message, that of the one it befell."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pipelines import configured
from process_jobs import failing
from processes import SECONDS, ended, exit_code
from transformers import TrainingArguments

from draftsmith.decode.errors import InputError
from draftsmith.distill import __main__ as command
from draftsmith.distill.config import DistillConfig
from draftsmith.scripts import cli
from draftsmith.train.cli import flags_of, run
from draftsmith.train.data.generate import PrepareConfig, prepare
from draftsmith.train.job.lock import lock_directory

pytestmark = pytest.mark.slow

MEMORY = "error: memory: expected enough for this run, found too little for 2.00 GiB; try a smaller batch"


def arguments(pipeline, output, alone=False, **options) -> list[str]:
    training = {"output_dir": output, "max_steps": 4, "per_device_train_batch_size": 1, "learning_rate": 3e-3}
    training |= {"report_to": "none", "disable_tqdm": "true"}
    entered = {"ddp_backend": "gloo", "accelerator_config": '{"use_configured_state": true}'}
    training |= {"use_cpu": "true"} if alone else entered
    training |= {"save_strategy": "steps", "save_steps": 1}
    options = {
        "target": pipeline / "target",
        "draft": pipeline / "draft",
        "completions": f"[{pipeline / 'long'}]",
    } | options
    options |= {f"training.{name}": value for name, value in training.items()}
    return flags_of(options)


@pytest.mark.parametrize(
    ("faults", "code", "said"),
    [
        ({1: "broken"}, 1, "rank 1: Traceback (most recent call last):"),
        ({0: "memory", 1: "memory"}, 2, MEMORY),
        ({1: "killed"}, 1, "error: rank 1 on"),
        ({0: "killed"}, 1, "error: rank 0 on"),
        ({0: "stuck", 1: "memory"}, 2, f"rank 1: {MEMORY}"),
        ({1: "nan"}, 2, "rank 1: error: loss: expected a finite number, found nan on rank 1 in step 2 on the samples "),
        ({1: "interrupted"}, 130, "rank 1: interrupted: checkpoint-1 is kept in"),
    ],
)
def test_what_befalls_a_rank_ends_the_job_with_its_message_alone(pipeline, tmp_path, faults, code, said):
    found = ended(failing, arguments(pipeline, tmp_path / "out"), faults)
    assert [end for end, _ in found] == [-signal.SIGKILL if faults.get(rank) == "killed" else code for rank in range(2)]
    spoken = "".join(text for _, text in found)
    lines = [line for line in spoken.splitlines() if "rank " in line or "rror" in line or "Traceback" in line]
    assert said in lines[0]
    if "Traceback" in said:
        assert spoken.count("Traceback") == 1 and lines[-1] == "RuntimeError: no such luck"
    else:
        assert len(lines) == 1


def test_a_rank_that_the_first_cannot_hear_speaks_for_itself(pipeline, tmp_path):
    found = ended(failing, arguments(pipeline, tmp_path / "out"), {1: "deaf"})
    assert [code for code, _ in found] == [1, 1]
    assert "warning: rank 1 cannot hear whether others fail, and may wait for them: " in found[1][1]
    assert found[1][1].rstrip().endswith("RuntimeError: no such luck")


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_a_loss_that_is_none_ends_sharded_training_too(pipeline, tmp_path, strategy):
    found = ended(failing, arguments(pipeline, tmp_path / "out"), {1: "nan"}, strategy=strategy)
    assert [code for code, _ in found] == [2, 2]
    (line,) = [line for _, text in found for line in text.splitlines() if "rror" in line]
    assert line.startswith(
        "rank 1: error: loss: expected a finite number, found nan on rank 1 in step 2 on the samples"
    )


def test_what_all_ranks_meet_is_said_once(pipeline, tmp_path):
    found = ended(failing, arguments(pipeline, tmp_path / "out", completions="[/nowhere]"), {})
    assert [code for code, _ in found] == [2, 2]
    spoken = "".join(text for _, text in found)
    assert spoken.count("error: ") == 1 and "/nowhere" in spoken


RANK = """
import os, signal, sys, time
from pathlib import Path
from draftsmith.decode.errors import InputError
from draftsmith.train.job.ranks import run_rank

fault, first, begun = sys.argv[1], os.environ["RANK"] == "0", Path(sys.argv[2])

def main():
    if fault == "input":
        raise InputError("completions: expected some, found none")
    if first and fault == "interrupted":
        while not begun.exists():
            time.sleep(0.05)
        os.kill(os.getppid(), signal.SIGINT)
    begun.touch()
    if first or fault == "interrupted":
        time.sleep(60)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("no such luck")

sys.exit(run_rank(main))
"""


def launcher(said: Path, *arguments: str) -> Callable[[], None]:
    """Return what runs the launcher behind `draftsmith distill` in a process of its own, and keeps what it says."""

    def work() -> None:
        sys.stderr = said.open("w", buffering=1)
        os.dup2(sys.stderr.fileno(), 2)
        options = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        os._exit(cli.run(lambda: cli._launched([*options, *arguments])))

    return work


def launched(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    """Run the launcher; return its exit code and what stood in the terminal."""
    code = exit_code(launcher(tmp_path / "said", *arguments))
    return code, (tmp_path / "said").read_text()


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("input", 2, "error: completions: expected some, found none"),
        ("killed", 1, "error: rank 1 ended without a word: expected it to finish, found it killed by SIGKILL"),
        ("broken", 1, "RuntimeError: no such luck"),
        ("interrupted", 130, "interrupted: nothing was kept; run the same command again"),
    ],
)
def test_the_command_ends_with_our_line_and_our_code(tmp_path, fault, code, said):
    (tmp_path / "rank.py").write_text(RANK)
    options = ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0", str(tmp_path / "rank.py")]
    found, text = launched(tmp_path, *options, fault, str(tmp_path / "begun"))
    assert found == code
    assert text.splitlines()[-1].startswith(said) and text.count("Traceback") == (fault == "broken")
    assert fault == "broken" or text.count("\n") == 1


GROUP = """
import os, signal, sys, time
import torch.distributed as dist
from draftsmith.train.job import ranks

def main():
    dist.init_process_group("gloo")
    ranks.watch("cpu")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)  # as in a collective that nothing ends

sys.exit(ranks.run_rank(main))
"""


def test_a_failure_on_one_machine_ends_the_job_on_the_others(tmp_path):
    (tmp_path / "group.py").write_text(GROUP)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free.getsockname()[1])]
    nodes = []
    for machine in ("0", "1"):
        options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "2", "--machine_rank", machine, *meeting]
        work = launcher(tmp_path / machine, *options, str(tmp_path / "group.py"))
        nodes.append(multiprocessing.get_context("fork").Process(target=work))
        nodes[-1].start()
    for node in nodes:
        node.join(SECONDS)
    assert [node.exitcode for node in nodes] == [1, 1]
    first, second = ((tmp_path / machine).read_text() for machine in ("0", "1"))
    assert "found it killed by SIGKILL" in second and "rank 1" in second and second.count("\n") == 1
    # The first process cannot know whether a launcher is left there to tell of the kill.
    assert not first or (first.startswith("error: rank 1 on ") and first.count("\n") == 1)


def test_a_file_that_accelerate_does_not_take_is_one_line(tmp_path):
    file = tmp_path / "accelerate.yaml"
    file.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nno_such_key: 1\n")
    code, text = launched(tmp_path, "--config_file", str(file), "-m", "draftsmith.distill")
    assert code == 2 and text.count("\n") == 1
    assert text.startswith("error: accelerate_config: expected what accelerate can launch, found: ")
    assert "no_such_key" in text


@pytest.mark.parametrize(
    ("training", "found"),
    [
        ({"fp16": True}, r"training.fp16: expected a GPU for it, found a CPU"),
        (
            {"report_to": ["wandb"]},
            "training: expected what can be had here, found: WandbCallback requires wandb to be installed",
        ),
    ],
)
def test_arguments_that_cannot_be_had_here_are_one_line(pipeline, tmp_path, training, found):
    with pytest.raises(InputError, match=found):
        command.distill(configured(pipeline, tmp_path, training={"max_steps": 1} | training))


def test_one_process_trains_on_one_gpu(pipeline, tmp_path, monkeypatch, capsys):
    """Where the library sees several it would split batches over them."""
    training = TrainingArguments(str(tmp_path), use_cpu=True, per_device_train_batch_size=8)
    training._n_gpu = 2
    config = DistillConfig(target="t", completions=["c"], draft="d", training=training)
    assert (config.training.n_gpu, config.training.train_batch_size) == (1, 8)
    assert capsys.readouterr().err == "GPUs: one of 2 is used; --processes makes more of them\n"


def test_a_second_run_in_a_directory_is_refused(pipeline, tmp_path, capsys):
    output = tmp_path / "out"
    found = "expected a directory that no other run writes, found one at work in"
    with lock_directory(output):
        assert run(lambda: command.main(arguments(pipeline, output, alone=True))) == 2
        with pytest.raises(InputError, match=f"^output: {found}"):
            prepare(PrepareConfig(str(pipeline / "target"), str(pipeline / "long.txt"), str(output)))
    assert f"training.output_dir: {found} {output}: process {os.getpid()} on " in capsys.readouterr().err
    assert not list(output.iterdir())


def test_an_output_that_cannot_be_is_refused_before_the_work(pipeline, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    argv = arguments(Path("nowhere"), tmp_path / "file" / "below", alone=True)
    assert run(lambda: command.main(argv)) == 2
    assert "error: training.output_dir: expected a directory to write in at" in capsys.readouterr().err


ENDING = """
import atexit, os, sys, threading, time
from draftsmith.train.job.ranks import leave

class Late:
    def __del__(self):
        os.write(1, b"destructor ")

def upload():
    time.sleep(0.2)
    print("thread", end=" ")

late = Late()
atexit.register(lambda: print("registered", end=" "))
threading.Thread(target=upload).start()
leave(3)
"""


@pytest.mark.parametrize(("processes", "said"), [(1, "thread registered destructor "), (2, "thread registered ")])
def test_one_of_several_processes_ends_without_destructors(processes, said):
    done = subprocess.run(
        [sys.executable, "-c", ENDING], env={**os.environ, "WORLD_SIZE": str(processes)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (3, said, "")
