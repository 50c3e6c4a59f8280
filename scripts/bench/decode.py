"""`python -m draftsmith.scripts.bench.decode`: the decoder against the library's own, and against what it could be.

Every ratio is within one run: each prompt is decoded by every method before the next prompt's turn, in an order that
rotates. Plain decoding has the same options as what it is compared with: dtype, threads, compiled or not.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode import Counts, DraftModelProposer, autoregressive_generate, speculative_generate
from draftsmith.scripts.bench.common import (
    PairConfig,
    Result,
    forward_costs,
    interleaved,
    interval,
    load_pair,
    over,
    summary,
    timed,
)
from draftsmith.train.cli import parse_config, run
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import environment, write_json


@dataclass
class BenchConfig(PairConfig):
    """Time the decoder at T=0 beside plain decoding and the library's assisted generation."""

    draft_length: int = 3
    """γ, drafted tokens a round."""
    batch_size: int = 8
    """Rows decoded together, compared with one row at a time; 1 leaves the comparison out."""
    compiled: bool = True
    """Also time compiled forwards, after minutes of compilation."""
    peer: bool = True
    """Also time the library's assisted generation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("draft_length", "batch_size")


def bench(config: BenchConfig, console: Console) -> dict[str, Any]:
    """Run the benchmark, print its tables and return the figures."""
    if config.threads:
        torch.set_num_threads(config.threads)
    target, draft, prompts = load_pair(config, load_tokenizer(config.target, field="target"))
    for name, value in (
        ("num_assistant_tokens", config.draft_length),
        ("num_assistant_tokens_schedule", "constant"),
        ("assistant_confidence_threshold", 0.0),
    ):
        setattr(draft.generation_config, name, value)
    methods = _methods(config, target, draft)
    results = interleaved(methods, prompts)
    figures: dict[str, Any] = {"environment": environment(target.device, config.dtype), "config": vars(config)}
    figures["methods"] = {name: summary(seen, results["plain"]) for name, seen in results.items()}
    if "assisted generation" in results:
        for name, seen in results.items():
            figures["methods"][name]["over_assisted_generation"] = over(seen, results["assisted generation"])
    if "plain, compiled" in results:
        figures["methods"]["speculative, compiled"]["over_plain_compiled"] = over(
            results["speculative, compiled"], results["plain, compiled"]
        )
    outside = {
        name: _outside(methods[name], (target, draft), prompts[:4])
        for name in ("plain", "speculative", "assisted generation")
        if name in methods
    }
    figures["outside_forwards"] = outside
    figures["limit"] = _limit(config, target, draft, results)
    if config.batch_size > 1:
        figures["batch"] = _batches(config, target, draft, prompts)
    _print(figures, console)
    if config.output:
        write_json(Path(config.output), figures)
    return figures


def _methods(
    config: BenchConfig, target: PreTrainedModel, draft: PreTrainedModel
) -> dict[str, Callable[[Tensor], Any]]:
    options = config.options
    generate: Any = target.generate

    def assisted(ids: Tensor) -> Tensor:
        return generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **options)

    def plain(ids: Tensor, compiled: bool = False) -> Any:
        return autoregressive_generate(target, ids, compiled=compiled, **options)

    def speculative(ids: Tensor, compiled: bool = False) -> Any:
        proposer = DraftModelProposer(draft)
        return speculative_generate(
            target, proposer, ids, draft_length=config.draft_length, compiled=compiled, **options
        )

    methods: dict[str, Callable[[Tensor], Any]] = {"plain": plain, "speculative": speculative}
    if config.peer:
        methods["assisted generation"] = assisted
    if config.compiled:
        methods["plain, compiled"] = lambda ids: plain(ids, compiled=True)
        methods["speculative, compiled"] = lambda ids: speculative(ids, compiled=True)
    return methods


@contextlib.contextmanager
def _clocked(models: Sequence[PreTrainedModel]) -> Iterator[list[float]]:
    """Collect the seconds of each call of the models' eager forwards."""
    seconds: list[float] = []

    def clocked(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            elapsed, output = timed(lambda: forward(*args, **kwargs))
            seconds.append(elapsed)
            return output

        return call

    for model in models:
        vars(model)["forward"] = clocked(model.forward)
    try:
        yield seconds
    finally:
        for model in models:
            del vars(model)["forward"]


def _outside(decode: Callable[[Tensor], Any], models: Sequence[PreTrainedModel], prompts: list[Tensor]) -> float:
    """Return the share of the time that is spent outside the models' forwards, the median over prompts."""
    shares = []
    for ids in prompts:
        with _clocked(models) as seconds:
            total, _ = timed(lambda ids=ids: decode(ids))  # type: ignore[misc]
        shares.append(1 - sum(seconds) / total)
    return median_high(shares)


def _limit(
    config: BenchConfig, target: PreTrainedModel, draft: PreTrainedModel, results: dict[str, list[Result]]
) -> dict[str, Any]:
    """Compare the speed-ups with τ·t(1) ÷ (d(γ) + t(γ + 1)): a loop that costs nothing, forwards as measured."""
    limits: dict[str, Any] = {}
    for suffix in ("", ", compiled"):
        if f"plain{suffix}" not in results:
            continue
        tau = sum((c for _, _, c in results[f"speculative{suffix}"] if c), Counts()).mean_acceptance_length() or 0.0
        t1, block, step = forward_costs(target, draft, config.draft_length, config.middle, compiled=bool(suffix))
        limit = tau * t1 / (config.draft_length * step + block)
        speedup = over(results[f"speculative{suffix}"], results[f"plain{suffix}"])
        limits[f"speculative{suffix}"] = {
            "target_milliseconds": {"1": 1e3 * t1, str(config.draft_length + 1): 1e3 * block},
            "draft_step_milliseconds": 1e3 * step,
            "limit": limit,
            "speedup": speedup,
            "share_of_limit": (speedup.value or float("nan")) / limit,
        }
    return limits


def _batches(
    config: BenchConfig, target: PreTrainedModel, draft: PreTrainedModel, prompts: list[Tensor]
) -> dict[str, Any]:
    """Compare tokens per second of `batch_size` rows together with those of one row at a time, taken in turns."""
    rows = (prompts * config.batch_size)[: config.batch_size]
    width = max(ids.shape[1] for ids in rows)
    batch = torch.cat([torch.nn.functional.pad(ids, (width - ids.shape[1], 0)) for ids in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(ids), (width - ids.shape[1], 0)) for ids in rows])
    options = config.options

    def speculative(ids: Tensor, mask: Tensor | None = None) -> Any:
        proposer = DraftModelProposer(draft)
        return speculative_generate(target, proposer, ids, mask, draft_length=config.draft_length, **options)

    def plain(ids: Tensor, mask: Tensor | None = None) -> Any:
        return autoregressive_generate(target, ids, mask, **options)

    found: dict[str, Any] = {"batch_size": config.batch_size}
    tokens = config.batch_size * config.max_new_tokens
    for name, decode in (("plain", plain), ("speculative", speculative)):
        ratios, together_seconds = [], []
        for repeat in range(4):
            together, output = timed(lambda decode=decode: decode(batch, mask))  # type: ignore[misc]
            alone = [timed(lambda decode=decode, ids=ids: decode(ids)) for ids in rows]  # type: ignore[misc]
            if repeat:  # the first warms up
                ratios.append(sum(s for s, _ in alone) / together)
                together_seconds.append(together)
        same = sum(
            torch.equal(row[-config.max_new_tokens :], own.sequences[0, -config.max_new_tokens :])
            for row, (_, own) in zip(output.sequences, alone, strict=True)
        )
        found[name] = {
            "tokens_per_second": tokens / median_high(together_seconds),
            "over_one_row_at_a_time": {"value": median_high(ratios), "range": [min(ratios), max(ratios)]},
            "rows_identical": f"{same} of {len(rows)}",
        }
    return found


def _print(figures: dict[str, Any], console: Console) -> None:
    environment = figures["environment"]
    console.print(f"{environment['device']}, {environment['threads']} threads, {environment['dtype']}", highlight=False)
    table = Table("method", "tokens/s", "over plain", "over assisted generation", "τ", box=None)
    for name, method in figures["methods"].items():
        table.add_row(
            name,
            f"{method['tokens_per_second'].value:.0f}",
            interval(method["over_plain"]),
            interval(method.get("over_assisted_generation")),
            f"{method['mean_acceptance_length']:.2f}" if method["mean_acceptance_length"] else "",
        )
    console.print(table)
    if "over_plain_compiled" in figures["methods"].get("speculative, compiled", {}):
        ratio = figures["methods"]["speculative, compiled"]["over_plain_compiled"]
        console.print(f"compiled speculative over compiled plain: {interval(ratio)}", highlight=False)
    for name, share in figures["outside_forwards"].items():
        console.print(f"outside the forwards, {name}: {share:.1%}", highlight=False)
    for name, limit in figures["limit"].items():
        costs = ", ".join(f"t({k}) {ms:.2f} ms" for k, ms in limit["target_milliseconds"].items())
        console.print(
            f"{name}: {costs}, draft step {limit['draft_step_milliseconds']:.2f} ms; limit {limit['limit']:.2f}×, "
            f"measured {limit['speedup'].value:.2f}×, {limit['share_of_limit']:.0%} of it",
            highlight=False,
        )
    if "batch" in figures:
        for name in ("plain", "speculative"):
            own = figures["batch"][name]
            console.print(
                f"{figures['batch']['batch_size']} rows together, {name}: {own['tokens_per_second']:.0f} tokens/s, "
                f"{own['over_one_row_at_a_time'].value:.2f}× one at a time; {own['rows_identical']} rows identical",
                highlight=False,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    bench(parse_config(BenchConfig, argv, prog="python -m draftsmith.scripts.bench.decode"), Console())
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
