"""`python -m benchmarks.cuts`: drafts that a plan cuts by their survival, against each fixed draft length.

All methods decode a batch of prompts before the next batch's turn, in an order that rotates. The plan has the costs of
rounds that the benchmark measures first, and keeps what it learns from batch to batch. The tokens of the target's
forwards are counted too: they can be compared where speeds are noisy.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from time import process_time
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import GenerationConfig

from benchmarks.common import Decoded, DecodingConfig, Figures, in_turns, main, tokens_and_seconds
from benchmarks.timing import options_at
from draftsmith.decode import (
    Counts,
    DecodeOutput,
    Plan,
    Round,
    autoregressive_generate,
    speculative_generate,
)
from draftsmith.decode.errors import at_least, require
from draftsmith.decode.measurement.costs import measure_costs
from draftsmith.decode.measurement.intervals import rate_ratio, ratio
from draftsmith.decode.sampling import Sampler
from draftsmith.scripts.kinds import drafter_specs
from draftsmith.scripts.pair import left_padded, load_pair
from draftsmith.train.data.corpus import encoded_prompts
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import environment

REPEATS = 5
"""Turns of the measured costs."""


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


class Verified:
    """An observer that counts the tokens of the target's forwards, each as wide as its batch's longest draft."""

    def __init__(self) -> None:
        self.tokens = 0
        self._widths: dict[int, int] = {}

    def __call__(self, round: Round) -> None:
        """Take note of a row's round: the batch's has ended if the row has had one."""
        if round.row in self._widths:
            self.end()
        self._widths[round.row] = round.nodes

    def end(self) -> None:
        """End a round of the batch."""
        self.tokens += (1 + max(self._widths.values())) * len(self._widths)
        self._widths = {}


def bench(config: BenchCutsConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures."""
    with patch("time.perf_counter", process_time) if config.cpu_time else nullcontext():
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
    samplers = {t: Sampler.of(t) for t in config.temperature}
    text, middle = list(chain.from_iterable(encoded)), config.max_prompt_tokens + config.max_new_tokens // 2
    tables = measure_costs(
        pair.target,
        {"": proposer},
        {"": longest},
        torch.tensor(text),
        samplers,
        config.batch_size,
        middle,
        config.max_prompt_tokens,
        range(1, longest + 2),
        REPEATS,
        config.compiled,
        seconds=8 * len(config.batch_size),
    )
    for temperature, table in zip(config.temperature, tables, strict=True):
        for rows in config.batch_size:
            costs = table.at("", rows)
            options = options_at(temperature, config.max_new_tokens) | {"compiled": config.compiled}
            plans: dict[str, int | Plan] = {f"γ = {k}": k for k in range(1, longest + 1)}
            plans["plan"] = Plan(costs, longest)
            decode = partial(speculative_generate, pair.target, proposer, **options)
            batches = [
                left_padded(encoded[i : i + rows], pair.target.device) for i in range(0, len(encoded) - rows + 1, rows)
            ]
            watches = {name: Verified() for name in plans}
            plain = partial(autoregressive_generate, pair.target, **options)
            results = decode_batches(plain, decode, plans, watches, batches * config.turns)
            figures[f"{config.draft}, B = {rows}, T = {temperature:g}"] = compared(results, watches)
    return {"environment": environment(torch.device("cpu"), config.dtype), **figures}


def decode_batches(
    plain: Callable[..., DecodeOutput],
    decode: Callable[..., DecodeOutput],
    plans: dict[str, int | Plan],
    watches: dict[str, Verified],
    batches: Sequence[tuple[Tensor, Tensor]],
) -> dict[str, list[Decoded]]:
    """Decode each batch, (B, T) and its mask, by every method in turn; the first batch warms up."""
    results: dict[str, list[Decoded]] = {name: [] for name in ("plain", *plans)}
    for turn, (ids, mask) in enumerate([batches[0], *batches]):
        methods = {"plain": partial(plain, ids, mask)}
        for name, plan in plans.items():
            # The first call is not counted.
            observer = watches[name] if turn else None
            methods[name] = partial(decode, ids, mask, draft_length=plan, seed=turn, observer=observer)
        for name, (seconds, output) in in_turns(methods, turn).items():
            if turn:
                tokens = sum(counts.num_emitted_tokens for counts in output.row_counts)
                results[name].append(Decoded(tokens, seconds, output.counts))
                if name in watches:
                    watches[name].end()
    return results


def compared(results: dict[str, list[Decoded]], watches: dict[str, Verified]) -> Figures:
    """Return each method's figures; its speed is also compared with that of the fastest fixed length."""
    speeds = {
        name: sum(d.tokens for d in decoded) / sum(d.seconds for d in decoded) for name, decoded in results.items()
    }
    best = max((name for name in watches if name != "plan"), key=lambda name: speeds[name])
    figures: Figures = {}
    for name, decoded in results.items():
        figures[name] = {
            "tokens_per_second": ratio(*tokens_and_seconds(decoded)),
            f"over_{best}": rate_ratio(*tokens_and_seconds(decoded), *tokens_and_seconds(results[best])),
        }
        if name in watches:
            tokens = sum(d.tokens for d in decoded)
            figures[name] |= {
                "mean_acceptance_length": sum((d.counts for d in decoded), Counts()).mean_acceptance_length(),
                "verified_per_token": watches[name].tokens / tokens,
            }
    return figures


if __name__ == "__main__":
    main(BenchCutsConfig, bench)
