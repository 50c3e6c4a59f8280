"""Distillation in two CPU processes, really launched: the same run as in one, pytest's own.

On CPU accelerate falls back to one process without an error, so that what ran is asserted, not assumed.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from processes import exit_code
from transformers import AutoModelForCausalLM

from draftsmith.distill import __main__ as command
from draftsmith.scripts import cli
from draftsmith.train.cli import run
from draftsmith.train.data.generate import PrepareConfig, prepare
from draftsmith.train.runs import save_model

pytestmark = pytest.mark.slow

FILE = str(Path(__file__).parents[2] / "configs/accelerate/cpu-2.yaml")
TWO = ["--config_file", FILE, "--main_process_port", "0"]

# The command as it is, that also says what it ran on.
WITNESS = """
import json
from pathlib import Path
from draftsmith.distill import __main__ as command
from draftsmith.scripts import cli
from draftsmith.train.job.ranks import leave, run_rank

distill = command.distill

def witnessed(config):
    trainer = distill(config)
    state = trainer.accelerator.state
    found = {
        "distributed_type": state.distributed_type.value,
        "num_processes": state.num_processes,
        "backend": state.backend,
        "wrapper": type(trainer.model_wrapped).__name__,
        "device": trainer.args.device.type,
    }
    Path(f"{config.training.output_dir}-rank{state.process_index}.json").write_text(json.dumps(found))
    return trainer

command.distill = witnessed
leave(run_rank(command.main))
"""

CONFIG = """
target: {root}/target
draft: {root}/draft
completions: [{root}/short, {root}/long]
heldout: [{root}/heldout]
temperature: 0.9
draft_length: 3
training:
  output_dir: {root}/{name}
  max_steps: 8
  per_device_train_batch_size: {batch}
  per_device_eval_batch_size: 2
  learning_rate: 3e-3
  logging_steps: 1
  eval_strategy: steps
  eval_steps: 4
  save_strategy: "no"
  report_to: none
  disable_tqdm: true
  use_cpu: true
"""


def configure(root: Path, name: str, batch: int) -> list[str]:
    """Write a config; return the flags that name it."""
    (root / f"{name}.yaml").write_text(CONFIG.format(root=root, name=name, batch=batch))
    return ["--config", str(root / f"{name}.yaml")]


def launch(root: Path, name: str, batch: int) -> None:
    """Do what `accelerate launch` does in a fork of this process, which starts the two."""
    said = root / "said"

    def work() -> None:
        for stream in (1, 2):
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os.environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        os._exit(cli._launched([*TWO, str(root / "witness.py"), *configure(root, name, batch)]))

    code = exit_code(work)
    assert code == 0, said.read_text()[-3000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokenizer):
    """The same global batches of 4 (in two processes: 2 + 2) for 8 steps, the last 3 of them in the second epoch."""
    root, vocab = tmp_path_factory.mktemp("runs"), len(tokenizer)
    for name, seed, layers in (("target", 0, 2), ("draft", 1, 1)):
        save_model(tiny_llama(seed, vocab, layers=layers), tokenizer, root / name)
    for name, count, tokens in (("short", 10, 3), ("long", 10, 12), ("heldout", 5, 9)):
        letter = "z" if name == "heldout" else "x"
        (root / f"{name}.txt").write_text("\n".join(f"{letter}{i} = {'y + ' * (i % 4)}1" for i in range(count)))
        prepare(
            PrepareConfig(
                str(root / "target"), str(root / f"{name}.txt"), str(root / name), max_new_tokens=tokens, seed=count
            )
        )
    (root / "witness.py").write_text(WITNESS)
    assert run(lambda: command.main(configure(root, "one", 4))) == 0
    launch(root, "two", 2)
    return root, *(json.loads((root / name / "trainer_state.json").read_text()) for name in ("one", "two"))


def logged(state: dict, key: str) -> list[float]:
    return [entry[key] for entry in state["log_history"] if key in entry]


def test_two_processes_really_ran(runs):
    root, _, _ = runs
    for rank in (0, 1):
        found = json.loads((root / f"two-rank{rank}.json").read_text())
        assert found["num_processes"] == 2
        assert found["distributed_type"] in ("MULTI_CPU", "MULTI_GPU")
        assert found["wrapper"] == "DistributedDataParallel"
        assert (found["device"], found["backend"]) == ("cpu", "gloo")
    assert not (root / "two-rank2.json").exists()


def test_the_loss_curve_is_that_of_one_process(runs):
    """Both sum the same token losses over the same global batch, in another order: float32 rounding is 1e-7 a step.

    A mean of the processes' means would be off by 1e-2 and more, since completions have 3 to 12 tokens.
    """
    _, one, two = runs
    assert len(logged(one, "loss")) == 8
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5)
    assert logged(two, "grad_norm") == pytest.approx(logged(one, "grad_norm"), rel=1e-4)
    assert len(set(logged(one, "loss"))) == 8
    assert max(logged(one, "epoch")) > 1


def test_held_out_metrics_are_those_of_one_process(runs):
    """Five samples on two processes: the sixth, that fills the last batch, must not count."""
    _, one, two = runs
    for name in ("alpha", "agreement", "mean_acceptance_length", "loss"):
        assert len(logged(one, f"eval_{name}")) == 2
        assert logged(two, f"eval_{name}") == pytest.approx(logged(one, f"eval_{name}"), rel=1e-5)


def test_the_weights_are_those_of_one_process(runs):
    root, _, _ = runs
    one, two = (AutoModelForCausalLM.from_pretrained(root / name).state_dict() for name in ("one", "two"))
    before = AutoModelForCausalLM.from_pretrained(root / "draft").state_dict()
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert (value - two[name]).abs().max() < 1e-5
        assert (value - before[name]).abs().max() > 1e-3
    assert (root / "two" / "draftsmith.json").is_file()
    with torch.no_grad():
        assert all(value.isfinite().all() for value in one.values())
