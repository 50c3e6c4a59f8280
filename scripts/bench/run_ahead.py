"""`python -m draftsmith.scripts.bench.run_ahead`: a draft that runs ahead of verification, and one that waits for it.

All in one run at T=0: each prompt is decoded by every method before the next prompt's turn, in an order that rotates.
A draft that runs ahead has one of the CPU threads and the target the others; a draft that waits shares with the target
either all of them or, to see what running ahead alone gives, those that the target is left with.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode import DecodeOutput, DraftModelProposer, autoregressive_generate, speculative_generate
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.run_ahead import RunAheadProposer
from draftsmith.scripts.bench.common import (
    PairConfig,
    Result,
    forward_costs,
    interleaved,
    interval,
    load_pair,
    over,
    summary,
)
from draftsmith.train.cli import parse_config, run
from draftsmith.train.models import check_same_tokenizer, load_tokenizer
from draftsmith.train.provenance import environment, write_json

AHEAD_THREADS = 1


@dataclass
class RunAheadConfig(PairConfig):
    """Time a draft that runs ahead beside plain decoding and a draft that does not, at T=0."""

    draft_device: str | None = None
    """Where the draft runs, such as cuda:1 or cpu; where the target does if None."""
    repeats: int = 3
    """How often; of each prompt's times the median counts."""
    draft_lengths: tuple[int, ...] = (1, 2, 3, 4)
    """The γ to try, drafted tokens a round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("repeats")
        if not self.draft_lengths or min(self.draft_lengths) < 1:
            raise InputError(f"draft_lengths: expected values from 1 on, found {list(self.draft_lengths)}")
        if self.threads is not None and self.threads < 1:
            raise InputError(f"threads: expected at least 1, found {self.threads}")


class Ahead:
    """Decodes with a draft that runs ahead, and counts how often that was used."""

    def __init__(self, target: PreTrainedModel, draft: PreTrainedModel, draft_length: int, options: dict[str, Any]):
        self.target, self.draft, self.draft_length, self.options = target, draft, draft_length, options
        self.rounds = self.used = 0

    def __call__(self, ids: Tensor) -> DecodeOutput:
        """Decode one prompt, (1, T)."""
        proposer = RunAheadProposer(self.draft, threads=AHEAD_THREADS)
        output = speculative_generate(self.target, proposer, ids, draft_length=self.draft_length, **self.options)
        proposer.close()
        self.rounds += output.counts.num_drafts
        self.used += proposer.num_used
        return output


def bench(config: RunAheadConfig, console: Console) -> dict[str, Any]:
    """Run the benchmark, print its table and return the figures."""
    threads = config.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    tokenizer = load_tokenizer(config.target, field="target")
    check_same_tokenizer(tokenizer, load_tokenizer(config.draft, field="draft"), config.target, config.draft)
    target, draft, prompts = load_pair(config, tokenizer, config.draft_device)
    fewer = max(1, threads - AHEAD_THREADS) if draft.device.type == "cpu" else threads

    options = config.options
    aheads = {k: Ahead(target, draft, k, options) for k in config.draft_lengths}
    methods: dict[str, Callable[[Tensor], Any]] = {"plain": lambda ids: autoregressive_generate(target, ids, **options)}
    for k, ahead in aheads.items():

        def in_turns(ids: Tensor, k: int = k) -> DecodeOutput:
            return speculative_generate(target, DraftModelProposer(draft), ids, draft_length=k, **options)

        methods[f"in turns, γ={k}"] = in_turns
        if fewer < threads:
            methods[f"in turns, fewer threads, γ={k}"] = _with_threads(fewer, threads, in_turns)
        methods[f"ahead, γ={k}"] = _with_threads(fewer, threads, ahead)
    runs = [interleaved(methods, prompts) for _ in range(config.repeats)]
    results = {name: _medians([run[name] for run in runs]) for name in methods}

    figures: dict[str, Any] = {
        "environment": environment(target.device, config.dtype),
        "config": vars(config),
        "threads": {"in_turns": threads, "target_while_ahead": fewer},
        "plain": summary(results["plain"], results["plain"]),
        "draft_lengths": {},
    }
    for k, ahead in aheads.items():
        waiting, running = results[f"in turns, γ={k}"], results[f"ahead, γ={k}"]
        alike = results.get(f"in turns, fewer threads, γ={k}", waiting)
        share = ahead.used / ahead.rounds
        _, block, step = _with_threads(fewer, threads, forward_costs)(target, draft, k, config.middle)
        figures["draft_lengths"][k] = {
            "in_turns": summary(waiting, results["plain"]),
            "in_turns_fewer_threads": summary(alike, results["plain"]),
            "ahead": summary(running, results["plain"]),
            "ahead_over_in_turns": over(running, waiting),
            "ahead_over_in_turns_fewer_threads": over(running, alike),
            "share_of_rounds_used": share,
            "milliseconds": {"draft_step": 1e3 * step, "target": 1e3 * block},
            # Were rounds their forwards alone, and drafting ahead neither slower than the target nor in its way.
            "at_most": (k * step + block) / ((1 - share) * k * step + block),
        }
    _print(figures, console)
    if config.output:
        write_json(Path(config.output), figures)
    return figures


def _with_threads(threads: int, otherwise: int, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        torch.set_num_threads(threads)
        try:
            return function(*args)
        finally:
            torch.set_num_threads(otherwise)

    return call


def _medians(runs: list[list[Result]]) -> list[Result]:
    """Return each prompt's result with the median of its seconds; tokens and counts are the same in every run."""
    return [(median_high(s for s, _, _ in seen), *seen[0][1:]) for seen in zip(*runs, strict=True)]


def _print(figures: dict[str, Any], console: Console) -> None:
    environment, threads = figures["environment"], figures["threads"]
    console.print(
        f"{environment['device']}, {environment['dtype']}; {threads['in_turns']} threads in turns; ahead: "
        f"{AHEAD_THREADS} of the draft, {threads['target_while_ahead']} of the target; "
        f"plain {figures['plain']['tokens_per_second'].value:.0f} tokens/s",
        highlight=False,
    )
    same = threads["in_turns"] == threads["target_while_ahead"]
    for k, own in figures["draft_lengths"].items():
        table = Table(f"γ = {k}", "tokens/s", "over plain", box=None)
        for name in ("in_turns", "ahead") if same else ("in_turns", "in_turns_fewer_threads", "ahead"):
            speed, ratio = own[name]["tokens_per_second"].value, own[name]["over_plain"]
            table.add_row(name.replace("_", " "), f"{speed:.0f}", interval(ratio))
        console.print(table)
        costs = own["milliseconds"]
        fewer = "" if same else f" ({interval(own['ahead_over_in_turns_fewer_threads'])} with fewer threads)"
        console.print(
            f"ahead over in turns {interval(own['ahead_over_in_turns'])}{fewer}; used in "
            f"{own['share_of_rounds_used']:.1%} of "
            f"rounds, which gives {own['at_most']:.2f}× at most (draft step {costs['draft_step']:.2f} ms, target "
            f"{costs['target']:.2f} ms, τ {own['ahead']['mean_acceptance_length']:.2f})",
            highlight=False,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    bench(parse_config(RunAheadConfig, argv, prog="python -m draftsmith.scripts.bench.run_ahead"), Console())
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
