"""What the ranks of distributed tests do: imported once, by the server that they are forked from."""

import gc
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401
from pipelines import configured
from processes import enter, witness
from recipes import RECIPES
from torch import nn
from transformers import conversion_mapping

from draftsmith.decode.errors import InputError
from draftsmith.distill import __main__ as command
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.medusa import MedusaHeads
from draftsmith.medusa.heads import __main__ as heads_command
from draftsmith.scripts import prepare as prepare_command
from draftsmith.train.data import generate
from draftsmith.train.data.generate import prepare
from draftsmith.train.job import ranks
from draftsmith.train.job.ranks import run_rank
from draftsmith.train.launch import load_target
from draftsmith.train.losses.output_head import open_forward
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.models import load_tokenizer
from draftsmith.train.teacher.cache_writer import make_cache

# What each rank would do anew: half a second of regular expressions, and looking through what was imported.
conversion_mapping.get_checkpoint_conversion_mapping("llama")
gc.collect()
gc.freeze()


def completed(strategy: str, config: Any) -> Any:
    """Complete prompts as one of the ranks; return what all of them wrote."""
    return prepare(config)


def cached(strategy: str, config: Any) -> Any:
    """Write a teacher cache as one of the ranks; return what all of them wrote."""
    return make_cache(config)


def commanded(strategy: str, arguments: list[str], fault: str | None = None) -> int:
    """Run `prepare` as a command, on one rank with a fault."""
    if fault == "apart":  # as on machines with disks of their own
        os.makedirs(os.environ["RANK"], exist_ok=True)
        os.chdir(os.environ["RANK"])
    elif fault is not None and os.environ["RANK"] == "1":

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise {"memory": MemoryError(), "input": InputError("target: expected finite logits, found NaN")}[fault]

        generate.write_shard = fail
    return run_rank(lambda: prepare_command.main(arguments))


def trained(
    strategy: str, pipeline: Path, output: Path, runs: dict[str, dict[str, Any]], launched: bool = False
) -> dict[str, dict[str, Any]]:
    """Train several times, one run after the other; return of each what it ran on, logged and saw.

    A run is its `kind` and the options of that kind's config; batches are 4 in one process and 2 in each of two, if it
    says nothing. `resumes` is a checkpoint to begin from; `apart` has each process be a machine with a disk of its own.
    """
    return {
        name: _trained(strategy, pipeline, output / name, dict(options), launched) for name, options in runs.items()
    }


def distilled(strategy: str, pipeline: Path, output: Path, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Distil several times; see `trained`."""
    return trained(strategy, pipeline, output, _of("draft", runs))


def eagled(strategy: str, pipeline: Path, output: Path, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train EAGLE-3 heads several times; see `trained`."""
    return trained(strategy, pipeline, output, _of("eagle", runs))


def _of(kind: str, runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {"kind": kind, **options} for name, options in runs.items()}


def _trained(strategy: str, pipeline: Path, output: Path, options: dict[str, Any], launched: bool) -> dict[str, Any]:
    train, configure = RECIPES[options.pop("kind")]
    gc.freeze()  # DeepSpeed leaves the engines of earlier runs, and collects the garbage twice a run
    trainer, seen = _watched(train, _config(configure, strategy, pipeline, output, options, launched))
    found = {
        **seen,
        "ran": witness(trainer),
        "log": trainer.state.log_history,
        "best": trainer.state.best_model_checkpoint,
    }
    if train is command.distill:
        share = next(trainer.target_ends.get_decoder().parameters())
        found["target"] = (type(share).__name__, getattr(share, "_local_tensor", share).numel() / share.numel())
    if train is heads_command.train_heads:
        model: Any = trainer.model_wrapped
        model.eval()
        with torch.no_grad():
            found["logits"] = model(inside=lambda: _logits(trainer.heads))
    return found


def loaded(strategy: str, pipeline: Path, output: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Load a target, and return how many bytes more the process had at most, what stayed, and what the model says."""
    config = _config(configured, strategy, pipeline, output, options, False)
    tokenizer = load_tokenizer(config.target)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before = _memory("VmRSS")
    target = load_target(config, tokenizer)
    peak, after = _memory("VmHWM") - before, _memory("VmRSS") - before
    with torch.no_grad():
        logits = target(torch.arange(10)[None]).logits
    parameter = next(target.get_decoder().parameters())
    return {"peak": peak, "after": after, "logits": logits, "parameter": type(parameter).__name__}


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def head_logits(directory: Path) -> torch.Tensor:
    """Read heads, in another process than trained them, and return what they say to the states `headed` showed them."""
    heads = MedusaHeads.from_pretrained(directory).eval()
    open_forward(*heads.all_lm_heads)
    with torch.no_grad():
        return _logits(heads)


def _logits(heads: MedusaHeads) -> torch.Tensor:
    """Return the logits of all heads, (5, K, V), each taken inside of the forward of what holds its weights."""
    count, size = heads.config.num_heads, heads.config.hidden_size
    hidden, *embeddings = torch.randn(1 + count, 5, size, generator=torch.Generator().manual_seed(0))
    seen = torch.stack(embeddings, dim=1)
    return torch.stack(
        [
            heads.lm_head_of(i)(heads.states(i, hidden, seen), inside=lambda h, i=i: heads.widened(heads.head(i)(h)))
            for i in range(count)
        ],
        dim=1,
    )


def failing(strategy: str, argv: list[str], faults: dict[int, str]) -> int:
    """Run `python -m draftsmith.distill` as a rank, in the second step of which some ranks come to harm."""
    enter(strategy, launched=True)
    fault, compute = faults.get(int(os.environ["RANK"])), DistillTrainer.summed_loss
    if "deaf" in faults.values():
        ranks.LONGEST = 1.0
    if fault == "deaf":
        os.environ["MASTER_ADDR"] = "nowhere.invalid"

    def harmed(self: Any, *args: Any) -> torch.Tensor:
        loss = compute(self, *args)
        if fault is None or self.state.global_step < 1:
            return loss
        if fault == "nan":
            return loss * float("nan")
        if fault == "inf":  # in the gradient alone
            loss.register_hook(lambda grad: grad * float("inf"))
            return loss
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "interrupted":
            signal.raise_signal(signal.SIGINT)
        if fault == "stuck":
            time.sleep(600)
        if fault == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        raise RuntimeError("no such luck")

    DistillTrainer.summed_loss = harmed
    return run_rank(lambda: command.main(argv))


def _config(
    configure: Callable[..., Any], strategy: str, pipeline: Path, output: Path, options: dict[str, Any], launched: bool
) -> Any:
    if options.pop("apart", False):
        output = output / os.environ["RANK"]
        os.environ["LOCAL_RANK"] = "0"
    entered = enter(strategy, launched)
    batch = 4 if strategy == "one" else 2
    defaults = {"max_steps": 8, "per_device_train_batch_size": batch, "per_device_eval_batch_size": 2}
    training = defaults | options.pop("training", {}) | entered
    checkpoint = options.pop("resumes", None)
    if checkpoint is not None and os.environ.get("RANK", "0") == "0":
        shutil.copytree(checkpoint, output / Path(checkpoint).name)
    config = configure(pipeline, output, training=training, temperature=0.9, **options)
    if checkpoint is not None:
        config.training.distributed_state.wait_for_everyone()
    return config


def rows_read(strategy: str, pipeline: Path, output: Path, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Distil several times; return of each the rows that this rank's steps read and all ids, or what was refused.

    What options say of "RANK" is said to each of its own.
    """
    return {name: _rows_read(strategy, pipeline, output / name, dict(options)) for name, options in runs.items()}


def _rows_read(strategy: str, pipeline: Path, output: Path, options: dict[str, Any]) -> Any:
    options["completions"] = [path.replace("RANK", os.environ["RANK"]) for path in options["completions"]]
    config = _config(configured, strategy, pipeline, output, options, launched=False)
    rows: list[list[int]] = []
    step = DistillTrainer.training_step

    def reading(self: Any, model: Any, inputs: Any, *args: Any) -> Any:
        rows.append(inputs["index"].tolist())
        return step(self, model, inputs, *args)

    DistillTrainer.training_step = reading
    try:
        trainer = command.distill(config)
        return rows, trainer.data.sample_ids(range(len(trainer.data)))
    except InputError as error:
        return str(error)
    finally:
        DistillTrainer.training_step = step


def _watched(train: Callable[..., Any], config: Any) -> tuple[Any, dict[str, list[Any]]]:
    """Train, and say what each forward of distillation saw (`texts`), what type its loss had (`losses`), and how often
    it computed a layer (`layers`)."""
    texts: list[list[list[int]]] = []
    losses: list[str] = []
    layers: list[int] = []
    step, compute = DistillTrainer.training_step, DistillTrainer.compute_loss

    def counting(self: Any, model: Any, *args: Any) -> Any:
        decoder = self.accelerator.unwrap_model(model).get_decoder()
        first = next(part for part in decoder.modules() if isinstance(part, nn.ModuleList))[0]
        calls: list[int] = []
        hook = next(first.children()).register_forward_pre_hook(lambda *_: calls.append(1))
        loss = step(self, model, *args)
        hook.remove()
        layers.append(len(calls))
        return loss

    def reading(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows = zip(inputs["input_ids"], inputs["labels"], strict=True)
        texts.append([ids[labels != IGNORED].tolist() for ids, labels in rows])
        return compute(self, model, inputs, *args, **kwargs)

    def summing(self: Any, *args: Any) -> Any:
        loss = summed(self, *args)
        losses.append(str(loss.dtype))
        return loss

    summed = DistillTrainer.summed_loss
    DistillTrainer.training_step, DistillTrainer.compute_loss, DistillTrainer.summed_loss = counting, reading, summing
    try:
        return train(config), {"texts": texts, "losses": losses, "layers": layers}
    finally:
        DistillTrainer.training_step, DistillTrainer.compute_loss, DistillTrainer.summed_loss = step, compute, summed
