"""`python -m benchmarks.cuts`: drafts that a plan cuts by their survival, against each fixed draft length.

All methods decode a batch of prompts before the next batch's turn, in an order that rotates. The plan keeps what it
learns from batch to batch. The tokens of the target's forwards are counted too: they can be compared where speeds are
noisy. Rounds count while all rows of the batch write, since a server fills the place of a row that has ended, and each
takes the median of its method's rounds of its width.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from benchmarks.common import DecodingConfig, Figures, in_turns, main
from benchmarks.timing import options_at
from draftsmith.decode import Plan, Proposer, autoregressive_generate, speculative_generate
from draftsmith.decode.errors import at_least, require
from draftsmith.decode.measurement.intervals import rate_ratio, ratio
from draftsmith.scripts.kinds import drafter_specs
from draftsmith.scripts.pair import left_padded, load_pair
from draftsmith.train.data.corpus import encoded_prompts
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import environment


@dataclass
class BenchCutsConfig(DecodingConfig):
    """Time drafts that a plan cuts by their survival, and drafts of each fixed length."""

    draft: str = "assets/tiny-draft"
    """A drafter of chains: a directory."""
    longest: int = 5
    """The greatest γ."""
    batch_size: list[int] = field(default_factory=lambda: [1, 4, 8])
    """B, rows decoded together."""
    temperature: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """Temperatures."""
    compiled: bool = False
    """Decode compiled."""
    turns: int = 1
    """How often each method decodes the prompts."""
    cpu_time: bool = False
    """Count the CPU time of this process in place of the clock's, where others use the machine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(1), "batch_size")
        require(self, at_least(0), "temperature")


class FullRounds:
    """An observer of the rounds in which all of `rows` rows still write, without the first, which has the prompts.

    A round takes from the first row's tokens in the round before to its own.
    """

    def __init__(self, rows: int) -> None:
        self.tokens, self.rounds, self.verified = 0, 0, 0
        self.seconds: dict[int, list[float]] = {}  # of rounds, by the widest draft
        self._rows, self._round = rows, dict[int, tuple[int, int]]()
        self._begin: float | None = None
        self._last: float | None = None

    def __call__(self, row: int, tokens: int, nodes: int) -> None:
        """Take note of a row's round."""
        if row in self._round or not self._round:
            self.end()
            self._begin, self._last = self._last, time.perf_counter()
        self._round[row] = tokens, nodes

    def end(self) -> None:
        """Count the round that has ended."""
        if len(self._round) == self._rows and self._begin is not None and self._last is not None:
            widest = max(nodes for _, nodes in self._round.values())
            self.seconds.setdefault(widest, []).append(self._last - self._begin)
            self.tokens += sum(tokens for tokens, _ in self._round.values())
            self.verified += self._rows * (1 + widest)
            self.rounds += self._rows
        self._round = {}


def bench(config: BenchCutsConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures."""
    with patch("time.perf_counter", time.process_time) if config.cpu_time else nullcontext():
        return _compared(config)


def _compared(config: BenchCutsConfig) -> dict[str, Any]:
    tokenizer = load_tokenizer(config.target, field="target")
    pair = load_pair(config.target, tokenizer, drafter_specs([config.draft], [config.longest]), config.dtype)
    pair.target.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id)
    (drafter,), encoded = (
        pair.drafters,
        encoded_prompts(config.prompts, tokenizer, config.limit, config.max_prompt_tokens),
    )
    proposer, longest = drafter.proposer, min(config.longest, drafter.proposer.longest or config.longest)
    figures: dict[str, Figures] = {}
    for temperature in config.temperature:
        for rows in config.batch_size:
            options = options_at(temperature, config.max_new_tokens) | {"compiled": config.compiled}
            plans: dict[str, int | Plan | None] = {f"γ = {k}": k for k in range(1, longest + 1)}
            plans |= {"plain": None, "plan": Plan(longest=longest)}
            decode = partial(decoded, pair.target, proposer, options)
            batches = [
                left_padded(encoded[i : i + rows], pair.target.device) for i in range(0, len(encoded) - rows + 1, rows)
            ]
            results: dict[str, list[FullRounds]] = {name: [] for name in plans}
            for turn, (ids, mask) in enumerate([batches[0], *batches * config.turns]):
                methods = {name: partial(decode, ids, mask, plan, turn) for name, plan in plans.items()}
                for name, (_, rounds) in in_turns(methods, turn).items():
                    if turn and rounds.rounds:  # the first turn warms up
                        results[name].append(rounds)
            figures[f"{config.draft}, B = {rows}, T = {temperature:g}"] = compared(results)
    return {"environment": environment(torch.device("cpu"), config.dtype), **figures}


def decoded(
    target: PreTrainedModel,
    proposer: Proposer,
    options: dict[str, Any],
    ids: Tensor,
    mask: Tensor,
    plan: int | Plan | None,
    seed: int,
) -> FullRounds:
    """Decode a batch, (B, T) and its mask; plainly if `plan` is None."""
    rounds = FullRounds(len(ids))
    if plan is None:
        autoregressive_generate(target, ids, mask, observer=lambda row, _: rounds(row.index, 1, 0), **options)
    else:
        options = options | {"draft_length": plan, "seed": seed}
        observer = lambda round: rounds(round.row, len(round.tokens), round.nodes)  # noqa: E731
        speculative_generate(target, proposer, ids, mask, observer=observer, **options)
    rounds.end()
    return rounds


def compared(results: dict[str, list[FullRounds]]) -> Figures:
    """Return each method's figures; its speed is also compared with that of the fastest fixed length."""
    columns = {name: ([r.tokens for r in rounds], priced(rounds)) for name, rounds in results.items()}
    fixed = [name for name in columns if name not in {"plain", "plan"}]
    best = max(fixed, key=lambda name: sum(columns[name][0]) / sum(columns[name][1]))
    return {
        name: {
            "tokens_per_second": ratio(*columns[name]),
            f"over_{best}": rate_ratio(*columns[name], *columns[best]),
            "mean_acceptance_length": sum(r.tokens for r in rounds) / sum(r.rounds for r in rounds),
            "verified_per_token": sum(r.verified for r in rounds) / sum(r.tokens for r in rounds),
        }
        for name, rounds in results.items()
    }


def priced(batches: Sequence[FullRounds]) -> list[float]:
    """Return the seconds of each batch's rounds if each took the median of a method's rounds of its width."""
    seconds: dict[int, list[float]] = {}
    for rounds in batches:
        for width, measured in rounds.seconds.items():
            seconds.setdefault(width, []).extend(measured)
    prices = {width: median(measured) for width, measured in seconds.items()}
    return [sum(prices[width] * len(measured) for width, measured in rounds.seconds.items()) for rounds in batches]


if __name__ == "__main__":
    main(BenchCutsConfig, bench)
