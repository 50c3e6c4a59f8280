"""`draftsmith quickstart`: the whole way on the embedded target, on any CPU, in minutes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from draftsmith.decode.errors import InputError
from draftsmith.distill.__main__ import distill
from draftsmith.distill.config import DistillConfig
from draftsmith.medusa.heads.__main__ import train_heads
from draftsmith.medusa.heads.config import MedusaTrainingConfig
from draftsmith.scripts.configs import QuickstartConfig, TreeConfig
from draftsmith.scripts.measure.command import measure
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.scripts.report.table import print_report
from draftsmith.scripts.report.types import Report
from draftsmith.scripts.tree import print_tree, search
from draftsmith.train.cli import flags_of, parse_config
from draftsmith.train.data.corpus import stdlib_prompts, write_prompts
from draftsmith.train.data.generate import PrepareConfig, prepare
from draftsmith.train.files import require_writable
from draftsmith.train.kinds.hybrid import AND
from draftsmith.train.runs import note_on_interrupt
from draftsmith.train.teacher.state_cache import StateCache
from draftsmith.train.trainer import RecipeTrainer

TREE_NODES = 2  # by costs the best in two runs of four, and within 5 % of it in a third
TAU = "eval_mean_acceptance_length"
ROOT = Path(__file__).resolve().parents[1]
TARGET, STOCK = ROOT / "assets/tiny-target", ROOT / "assets/tiny-draft"
SWITCH = "match=3,score=3"
"""The switch of a hybrid of copies and the draft on this target, as `tune` found it at T = 0."""


@dataclass(frozen=True)
class Sizes:
    """The prompts of each stage, and the steps of both trainings, None for those of their configs."""

    train: int = 640
    """Prompts to distil on: two thirds sampled and one third greedy, because the draft is measured under both."""
    heldout: int = 64
    """Prompts from held-out modules, to select the best checkpoint on."""
    searched: int = 48
    """More prompts from the training modules, to search the tree on."""
    measured: int = 20
    """More held-out prompts, decoded by every method."""
    replayed: int = 128
    """Held-out prompts to replay acceptance on, the measured ones first. The draft was not selected on any of them."""
    steps: int | None = None


FULL = Sizes()


def quickstart(config: QuickstartConfig, console: Console, sizes: Sizes = FULL) -> Report:
    """Run all stages and return the report."""
    for directory in (TARGET, STOCK):
        if not directory.is_dir():
            raise InputError(f"quickstart: expected the source tree's {directory}, found nothing (run it from a clone)")
    if AND in config.output:
        raise InputError(f"output: expected a path without {AND}, which joins drafters, found {config.output}")
    output = require_writable(config.output)
    with note_on_interrupt(lambda: _kept(output)):
        return _stages(sizes, output, console)


def _stages(sizes: Sizes, output: Path, console: Console) -> Report:
    begins = list[float]()

    def stage(title: str) -> None:
        begins.append(time.perf_counter())
        console.rule(f"{len(begins)}/4 {title}")

    stage("prepare: the target completes prompts")
    train = stdlib_prompts(sizes.train, heldout=False)
    heldout = stdlib_prompts(sizes.heldout + sizes.replayed, heldout=True)
    selection, measured = heldout[: sizes.heldout], heldout[sizes.heldout :]
    sampled = len(train) * 2 // 3
    for side, records, temperature in (
        ("sampled", train[:sampled], 1),
        ("greedy", train[sampled:], 0),
        ("heldout", selection, 1),
        ("searched", stdlib_prompts(sizes.searched, heldout=False, seed=3), 0),
    ):
        prompts = output / "prompts" / f"{side}.jsonl"
        write_prompts(prompts, records)
        fields = {"prompts": prompts, "output": output / "completions" / side, "temperature": temperature}
        summary = prepare(_config(PrepareConfig, "prepare", fields))
        share = summary.repeated_ngram_share
        console.print(f"{side}: {summary.tokens} tokens; {share:.1%} of their 4-grams repeat an earlier one")

    stage("distil: the stock draft learns the target's distribution")
    data: dict[str, Any] = {
        "completions": [str(output / "completions" / side) for side in ("sampled", "greedy")],
        "heldout": [str(output / "completions/heldout")],
    }
    if sizes.steps:
        data |= {f"training.{name}": sizes.steps for name in ("max_steps", "eval_steps", "save_steps")}
    kept = StateCache()  # both recipes learn from the same texts
    fields = data | {"draft": STOCK, "training.output_dir": output / "draft"}
    _print_gain(distill(_config(DistillConfig, "distill", fields), kept), console)

    stage("medusa: Hydra heads on the target's hidden states, and a tree for them")
    fields = data | {"training.output_dir": output / "medusa"}
    _print_gain(train_heads(_config(MedusaTrainingConfig, "medusa", fields), kept), console)
    fields = {"drafter": output / "medusa", "completions": [str(output / "completions/searched")], "nodes": TREE_NODES}
    print_tree(search(_config(TreeConfig, "tree", fields)), console)

    stage("measure: plain and speculative decoding of held-out prompts, interleaved")
    write_prompts(output / "prompts/measured.jsonl", measured)
    drafters = [str(output / name) for name in ("draft", "medusa")]
    drafters.append(f"hybrid:suffix{AND}{output / 'draft'}@{SWITCH}")  # a hybrid needs no training
    fields = {"drafter": drafters, "baseline_draft": STOCK, "output": output}
    fields |= {"prompts": output / "prompts/measured.jsonl", "limit": sizes.measured}
    fields |= {"replay_limit": sizes.replayed, "max_new_tokens": 64, "compiled": "false"}
    fields |= {"costs": "none"}  # these forecast other γ, in a minute more
    report = measure(_config(MeasureConfig, "measure", fields))
    print_report(report, console)
    seconds = np.diff([*begins, time.perf_counter()])
    names = ("prepare", "distil", "medusa", "measure")
    console.print("seconds: " + ", ".join(f"{name} {spent:.0f}" for name, spent in zip(names, seconds, strict=True)))
    return report


def _kept(output: Path) -> str | None:
    directories = [f"{name}/" for name in ("completions", "draft", "medusa") if (output / name).is_dir()]
    return f"what is in {', '.join(directories)} of {output} is kept" if directories else None


def _print_gain(trainer: RecipeTrainer, console: Console) -> None:
    history = trainer.state.log_history
    before, after = next(entry[TAU] for entry in history if TAU in entry), trainer.kept_evaluation[TAU]
    console.print(f"replayed mean acceptance length on held-out completions: {before:.2f} → {after:.2f}")


def _config(cls: type[Any], folder: str, fields: Mapping[str, Any]) -> Any:
    """Return the config of configs/FOLDER/tiny.yaml for the embedded target, overridden by these fields."""
    return parse_config(
        cls, ["--config", str(ROOT / f"configs/{folder}/tiny.yaml"), *flags_of({"target": TARGET, **fields})]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run all stages, print the table, and list the files."""
    config = parse_config(QuickstartConfig, argv, prog="draftsmith quickstart")
    console, start = Console(), time.perf_counter()
    quickstart(config, console)
    console.print(f"\ndone in {time.perf_counter() - start:.0f} s; the files:")
    for name, what in (
        ("draft/", "the distilled draft, an ordinary Hugging Face directory"),
        ("medusa/", "the heads, with their tree in config.json"),
        ("completions/", "what the target wrote"),
        ("report.html", "the verdict, and every figure that it rests on, on one page"),
        ("report.json", "the same for machines, with counts and intervals"),
    ):
        console.print(f"  {Path(config.output) / name}  {what}", highlight=False)
    return 0
