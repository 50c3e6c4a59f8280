"""`python -m draftsmith.scripts.bench.run_ahead`: a draft that runs ahead of verification, and one that waits for it.

All in one run at T=0: each prompt is decoded by every method before the next prompt's turn, in an order that rotates.
A draft that runs ahead has one of the CPU threads and the target the others; a draft that waits shares with the target
either all of them or, to see what running ahead alone gives, those that the target is left with.
"""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median_high
from typing import Any

import torch
from torch import Tensor

from draftsmith.decode import DecodeOutput
from draftsmith.decode.errors import at_least, require, require_some
from draftsmith.decode.proposers.run_ahead import RunAheadProposer
from draftsmith.scripts.bench import common
from draftsmith.scripts.bench.common import Decoded, DecodingConfig, over, summary
from draftsmith.train.cli import run
from draftsmith.train.provenance import environment

AHEAD_THREADS = 1


@dataclass
class BenchRunAheadConfig(DecodingConfig):
    """Time a draft that runs ahead beside plain decoding and a draft that does not, at T=0."""

    draft_device: str | None = None
    """Where the draft runs, such as cuda:1 or cpu; where the target does if None."""
    repeats: int = 3
    """How often; of each prompt's times the median counts."""
    draft_lengths: tuple[int, ...] = (1, 2, 3, 4)
    """The γ to try, drafted tokens a round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_some(self, "draft_lengths", "draft length")
        require(self, at_least(1), "draft_lengths")


def bench(config: BenchRunAheadConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures."""
    threads = torch.get_num_threads()
    pair = common.BenchmarkPair.load(config, config.draft_device)
    fewer = max(1, threads - AHEAD_THREADS) if pair.draft.device.type == "cpu" else threads
    with_fewer = partial(_with_threads, fewer, threads)

    proposers = {k: RunAheadProposer(pair.draft, threads=AHEAD_THREADS) for k in config.draft_lengths}
    rounds: Counter[int] = Counter()

    def ahead(ids: Tensor, draft_length: int) -> DecodeOutput:
        output = pair.speculative(ids, proposer=proposers[draft_length], draft_length=draft_length)
        proposers[draft_length].close()  # or it would draft on in another method's turn
        rounds[draft_length] += output.counts.num_drafts
        return output

    methods: dict[str, Callable[[Tensor], DecodeOutput]] = {"plain": pair.plain}
    for k in config.draft_lengths:
        waiting = partial(pair.speculative, draft_length=k)
        methods[f"in turns, γ={k}"] = waiting
        if fewer < threads:
            methods[f"in turns, fewer threads, γ={k}"] = with_fewer(waiting)
        methods[f"ahead, γ={k}"] = with_fewer(partial(ahead, draft_length=k))
    runs = [common.decode_in_turns(methods, pair.prompts) for _ in range(config.repeats)]
    results = {name: _medians([run[name] for run in runs]) for name in methods}

    by_length = {}
    for k, proposer in proposers.items():
        in_turns, running = results[f"in turns, γ={k}"], results[f"ahead, γ={k}"]
        alike = results.get(f"in turns, fewer threads, γ={k}", in_turns)
        share = proposer.num_used / rounds[k]
        _, block, step = with_fewer(common.forward_seconds)(pair, k, config.middle)
        by_length[k] = {
            "in_turns": summary(in_turns, results["plain"]),
            "in_turns_fewer_threads": summary(alike, results["plain"]),
            "ahead": summary(running, results["plain"]),
            "ahead_over_in_turns": over(running, in_turns),
            "ahead_over_in_turns_fewer_threads": over(running, alike),
            "share_of_rounds_used": share,
            "milliseconds": {"draft_step": 1e3 * step, "target": 1e3 * block},
            # Were rounds their forwards alone, and drafting ahead neither slower than the target nor in its way.
            "at_most": (k * step + block) / ((1 - share) * k * step + block),
        }
    return {
        "environment": environment(pair.target.device, pair.dtype),
        "config": vars(config),
        "threads": {"in_turns": threads, "target_while_ahead": fewer},
        "plain": summary(results["plain"], results["plain"]),
        "draft_lengths": by_length,
    }


def _with_threads(threads: int, otherwise: int, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        torch.set_num_threads(threads)
        try:
            return function(*args)
        finally:
            torch.set_num_threads(otherwise)

    return call


def _medians(runs: list[list[Decoded]]) -> list[Decoded]:
    """Return each prompt's result with the median of its seconds; tokens and counts are the same in every run."""
    return [same[0]._replace(seconds=median_high(one.seconds for one in same)) for same in zip(*runs, strict=True)]


if __name__ == "__main__":
    sys.exit(run(partial(common.run_benchmark, BenchRunAheadConfig, bench)))
