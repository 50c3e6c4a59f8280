"""`draftsmith quickstart`: the whole way on the embedded target, on any CPU, in minutes."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith.decode.errors import InputError
from draftsmith.decode.planner import verification_costs
from draftsmith.distill.__main__ import distill
from draftsmith.distill.config import DistillConfig
from draftsmith.medusa.__main__ import train_heads
from draftsmith.medusa.config import MedusaTrainingConfig
from draftsmith.scripts.configs import MedusaTreeConfig, QuickstartConfig
from draftsmith.scripts.measure.command import measure
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.scripts.medusa_tree import print_tree, search
from draftsmith.scripts.report.table import print_report
from draftsmith.scripts.report.types import Report
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.corpus import stdlib_prompts, write_prompts
from draftsmith.train.data.generate import PrepareConfig, prepare
from draftsmith.train.models import load_model
from draftsmith.train.trainer import RecipeTrainer

ROOT = Path(__file__).resolve().parents[1]
TARGET, STOCK = ROOT / "assets/tiny-target", ROOT / "assets/tiny-draft"


def quickstart(config: QuickstartConfig, console: Console) -> Report:
    """Run all stages and return the report."""
    for directory in (TARGET, STOCK):
        if not directory.is_dir():
            raise InputError(f"quickstart: expected the source tree's {directory}, found nothing (run it from a clone)")
    output = Path(config.output)
    console.rule("1/4 prepare: the target completes prompts")
    train = stdlib_prompts(config.train_prompts, heldout=False)
    heldout = stdlib_prompts(config.heldout_prompts + config.replayed_prompts, heldout=True)
    selection, measured = heldout[: config.heldout_prompts], heldout[config.heldout_prompts :]
    sampled = len(train) * 2 // 3
    for side, records, temperature in (
        ("sampled", train[:sampled], 1),
        ("greedy", train[sampled:], 0),
        ("heldout", selection, 1),
        ("searched", stdlib_prompts(config.searched_prompts, heldout=False, seed=3), 0),
    ):
        prompts = output / "prompts" / f"{side}.jsonl"
        write_prompts(prompts, records)
        flags = ["--prompts", prompts, "--output", output / "completions" / side, "--target", TARGET]
        flags += ["--temperature", temperature]
        summary = prepare(_config(PrepareConfig, "prepare", flags))
        share = summary.repeated_ngram_share
        console.print(f"{side}: {summary.tokens} tokens; {share:.1%} of their 4-grams repeat an earlier one")

    console.rule("2/4 distil: the stock draft learns the target's distribution")
    data: list[Any] = [
        "--completions",
        json.dumps([str(output / "completions" / side) for side in ("sampled", "greedy")]),
    ]
    data += ["--heldout", json.dumps([str(output / "completions/heldout")]), "--target", TARGET]
    if config.steps:
        data += ["--training.max_steps", config.steps, "--training.eval_steps", config.steps]
        data += ["--training.save_steps", config.steps]
    flags = [*data, "--draft", STOCK, "--training.output_dir", output / "draft"]
    _print_gain(distill(_config(DistillConfig, "distill", flags)), console)

    console.rule("3/4 medusa: heads on the target's hidden states, and the tree that is accepted furthest")
    flags = [*data, "--training.output_dir", output / "medusa"]
    _print_gain(train_heads(_config(MedusaTrainingConfig, "medusa", flags)), console)
    flags = ["--target", TARGET, "--heads", output / "medusa"]
    flags += ["--completions", json.dumps([str(output / "completions/searched")])]
    print_tree(search(_config(MedusaTreeConfig, "medusa-tree", flags), progress=False), console)

    console.rule("4/4 measure: plain and speculative decoding of held-out prompts, interleaved")
    dtype, timings = faster_dtype()
    console.print(f"dtype {dtype}: one target forward of 1 and 3 tokens took " + "; ".join(timings))
    flags = ["--target", TARGET, "--draft", output / "draft", "--baseline_draft", STOCK, "--output", output]
    flags += ["--medusa", output / "medusa"]
    write_prompts(output / "prompts/measured.jsonl", measured)
    flags += ["--prompts", output / "prompts/measured.jsonl", "--limit", config.measured_prompts]
    flags += ["--replay_limit", config.replayed_prompts, "--dtype", dtype]
    report = measure(_config(MeasureConfig, "measure", flags))
    print_report(report, console)
    return report


def _print_gain(trainer: RecipeTrainer, console: Console) -> None:
    history = trainer.state.log_history
    scores = [entry["eval_mean_acceptance_length"] for entry in history if "eval_mean_acceptance_length" in entry]
    console.print(f"replayed mean acceptance length on held-out completions: {scores[0]:.2f} → {scores[-1]:.2f}")


def faster_dtype(drafted: int = 2) -> tuple[str, list[str]]:
    """Choose the dtype whose target forward over a drafted block is faster on this machine.

    bfloat16 halves the memory traffic, but a CPU without instructions for it emulates the arithmetic. All methods,
    plain decoding included, are then measured in the same dtype.

    Returns:
        The dtype's name, and for each dtype the milliseconds of a forward of 1 and of `drafted` + 1 tokens.
    """
    medians = {}
    for dtype in ("float32", "bfloat16"):
        seconds = verification_costs(load_model(TARGET, dtype=dtype), 1, 64, (1, drafted + 1), repeats=15)
        medians[dtype] = [seconds[1], seconds[drafted + 1]]
    texts = [f"{one * 1e3:.1f} and {block * 1e3:.1f} ms in {dtype}" for dtype, (one, block) in medians.items()]
    return min(medians, key=lambda dtype: medians[dtype][1]), texts


def _config(cls: type[Any], folder: str, flags: list[Any]) -> Any:
    return parse_config(cls, ["--config", str(ROOT / f"configs/{folder}/tiny.yaml"), *map(str, flags)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run all stages, print the table and where the files are."""
    config = parse_config(QuickstartConfig, argv, prog="draftsmith quickstart")
    console, start = Console(), time.perf_counter()
    quickstart(config, console)
    console.print(f"\ndone in {time.perf_counter() - start:.0f} s; the files:")
    for name, what in (
        ("draft/", "the distilled draft, an ordinary Hugging Face directory"),
        ("medusa/", "the heads, with the picture of their tree in tree.svg"),
        ("completions/", "what the target wrote"),
        ("report.html", "the verdict, and every figure behind it, on one page"),
        ("report.json", "the same for machines, with counts and intervals"),
    ):
        console.print(f"  {Path(config.output) / name}  {what}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
