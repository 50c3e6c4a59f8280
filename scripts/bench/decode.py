"""`python -m draftsmith.scripts.bench.decode`: the decoder against the library's own, and against what it could be.

Every ratio is within one run: each prompt is decoded by every method before the next prompt's turn, in an order that
rotates. Plain decoding has the same options as what it is compared with: dtype, threads, compiled or not.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_high
from typing import Any

import torch
from torch import Tensor

from draftsmith.decode import Counts, DecodeOutput
from draftsmith.decode.clock import now, timed
from draftsmith.scripts.bench import common
from draftsmith.scripts.bench.common import DecodingConfig
from draftsmith.train.cli import run
from draftsmith.train.provenance import environment

Method = Callable[[Tensor], DecodeOutput]


@dataclass
class BenchDecodeConfig(DecodingConfig):
    """Time the decoder at T=0 beside plain decoding and the library's assisted generation."""

    draft_length: int = 3
    """γ, drafted tokens a round."""
    batch_size: int = 8
    """Rows decoded together, compared with one row at a time; 1 leaves the comparison out."""
    compiled: bool = True
    """Also time compiled forwards, after minutes of compilation."""
    peer: bool = True
    """Also time the library's assisted generation."""


def bench(config: BenchDecodeConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures."""
    pair = common.BenchmarkPair.load(config)
    plain, speculative = pair.plain, partial(pair.speculative, draft_length=config.draft_length)
    methods: dict[str, Method] = {"plain": plain, "speculative": speculative}
    if config.peer:
        methods["assisted generation"] = partial(_assisted, pair, config.draft_length)
    clocked_methods = list(methods.items())
    if config.compiled:
        methods["plain, compiled"] = partial(plain, compiled=True)
        methods["speculative, compiled"] = partial(speculative, compiled=True)
    results = common.decode_in_turns(methods, pair.prompts)
    speeds = {name: common.summary(result, results["plain"]) for name, result in results.items()}
    if config.peer:
        for name, result in results.items():
            speeds[name]["over_assisted_generation"] = common.over(result, results["assisted generation"])
    limits = {"speculative": _limit(config, pair, results["speculative"], results["plain"])}
    if config.compiled:
        compiled = results["speculative, compiled"], results["plain, compiled"]
        speeds["speculative, compiled"]["over_plain_compiled"] = common.over(*compiled)
        limits["speculative, compiled"] = _limit(config, pair, *compiled, compiled=True)
    figures = {
        "environment": environment(pair.target.device, pair.dtype),
        "config": vars(config),
        "methods": speeds,
        "outside_forwards": {name: _share_outside_forwards(method, pair) for name, method in clocked_methods},
        "limit": limits,
    }
    if config.batch_size > 1:
        batch = {name: _batch(config, methods[name], pair.prompts) for name in ("plain", "speculative")}
        figures["batch"] = {"batch_size": config.batch_size, **batch}
    return figures


def _assisted(pair: common.BenchmarkPair, draft_length: int, ids: Tensor) -> DecodeOutput:
    """Decode with the draft by the library's own loop, which counts nothing: γ is constant, and it is never unsure."""
    settings = {"num_assistant_tokens": draft_length, "num_assistant_tokens_schedule": "constant"}
    pair.draft.generation_config.update(**settings, assistant_confidence_threshold=0.0)
    generate: Any = pair.target.generate
    options = {"attention_mask": torch.ones_like(ids), "assistant_model": pair.draft, **pair.options}
    return DecodeOutput(generate(ids, **options), Counts(), ())


def _share_outside_forwards(decode: Method, pair: common.BenchmarkPair) -> float:
    """Return the share of the time that is spent outside the models' eager forwards, the median over four prompts."""
    shares = []
    for ids in pair.prompts[:4]:
        edges: list[float] = []  # where forwards begin and end, by turns

        def note(*_: Any, edges: list[float] = edges) -> None:
            edges.append(now())

        with contextlib.ExitStack() as hooks:
            for model in (pair.target, pair.draft):
                hooks.enter_context(model.register_forward_pre_hook(note))
                hooks.enter_context(model.register_forward_hook(note))
            seconds, _ = timed(partial(decode, ids))
        shares.append(1 - (sum(edges[1::2]) - sum(edges[::2])) / seconds)
    return median_high(shares)


def _limit(
    config: BenchDecodeConfig,
    pair: common.BenchmarkPair,
    speculative: Sequence[common.Decoded],
    plain: Sequence[common.Decoded],
    compiled: bool = False,
) -> dict[str, Any]:
    """Compare the speed-up with τ·t(1) ÷ (d(γ) + t(γ + 1)): a loop that costs nothing, forwards as measured."""
    one, block, step = common.forward_seconds(pair, config.draft_length, config.middle, compiled)
    tau, speedup = common.mean_acceptance_length(speculative) or 0.0, common.over(speculative, plain)
    limit = tau * one / (config.draft_length * step + block)
    return {
        "target_milliseconds": {"1": 1e3 * one, str(config.draft_length + 1): 1e3 * block},
        "draft_step_milliseconds": 1e3 * step,
        "limit": limit,
        "speedup": speedup,
        "share_of_limit": (speedup.value or float("nan")) / limit,
    }


def _batch(config: BenchDecodeConfig, decode: Callable[..., DecodeOutput], prompts: list[Tensor]) -> dict[str, Any]:
    """Compare tokens per second of `batch_size` rows together with those of one row at a time, taken in turns."""
    count, new = config.batch_size, config.max_new_tokens
    rows = (prompts * count)[:count]
    calls: dict[str, Callable[[], Any]] = {
        "together": partial(decode, *common.padded(rows)),
        "alone": lambda: [decode(ids) for ids in rows],
    }
    turns = [common.in_turns(calls, turn) for turn in range(4)][1:]  # the first warms up
    together, alone = ([turn[name][0] for turn in turns] for name in calls)
    ratios = [apart / joint for joint, apart in zip(together, alone, strict=True)]
    texts = [row[-new:] for row in turns[-1]["together"][1].sequences]
    same = sum(
        torch.equal(text, one.sequences[0, -new:]) for text, one in zip(texts, turns[-1]["alone"][1], strict=True)
    )
    return {
        "tokens_per_second": count * new / median_high(together),
        "over_one_row_at_a_time": {"value": median_high(ratios), "range": [min(ratios), max(ratios)]},
        "rows_identical": f"{same} of {count}",
    }


if __name__ == "__main__":
    sys.exit(run(partial(common.run_benchmark, BenchDecodeConfig, bench)))
