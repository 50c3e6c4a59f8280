"""`python -m benchmarks.decode`: the decoder against the library's own, and against what it could be.

Every ratio is within one run: each prompt is decoded by every method before the next prompt's turn, in an order that
rotates. What is compared has the same options: dtype, threads, compiled or not. Compiled decoding is compared with the
library's assisted generation as users compile it; with what the library refuses, it cannot be compared.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_high
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config

from benchmarks.common import (
    BenchmarkPair,
    Decoded,
    DecodingConfig,
    Method,
    decode_in_turns,
    in_turns,
    main,
    tokens_and_seconds,
)
from draftsmith.decode import Counts, DecodeOutput
from draftsmith.decode.clock import now, timed
from draftsmith.decode.measurement.intervals import Estimate, ratio, ratio_product
from draftsmith.decode.planning.costs import verification_costs
from draftsmith.scripts.pair import left_padded
from draftsmith.train.provenance import environment


@dataclass
class BenchDecodeConfig(DecodingConfig):
    """Time the decoder at T=0 against plain decoding and the library's assisted generation, each eager and compiled."""

    draft_length: int = 3
    """γ, drafted tokens a round."""
    batch_size: int = 8
    """Rows decoded together, compared with one row at a time."""
    compiled: bool = True
    """Also time compiled forwards, after minutes of compilation."""


ASSISTED = "assisted generation"
STATIC = {"cache_implementation": "static"}
"""The cache that the library recommends for compiled generation."""
COMPILATIONS = 64
"""The limit of compilations: prompts, first blocks and drafts, each with an empty and with a cropped cache."""


def bench(config: BenchDecodeConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures."""
    pair = BenchmarkPair.load(config)
    plain, speculative = pair.plain, partial(pair.speculative, draft_length=config.draft_length)
    eager: dict[str, Method] = {"plain": plain, "speculative": speculative}
    assisted = eager[ASSISTED] = partial(_assisted, pair, config.draft_length)
    compiled: dict[str, Method] = {}
    if config.compiled:
        compiled["plain, compiled"] = partial(plain, compiled=True)
        compiled["speculative, compiled"] = partial(speculative, compiled=True)
        compiled[f"{ASSISTED}, compiled"] = _Compiled(pair, assisted)
    others: dict[str, Method] = {f"{ASSISTED}, static cache": partial(assisted, **STATIC)}
    refused = {name: reason for name, method in others.items() if (reason := _refusal(method, pair.prompts[0]))}
    methods = eager | compiled | {name: method for name, method in others.items() if name not in refused}
    results = decode_in_turns(methods, pair.prompts)
    speeds: dict[str, dict[str, Any]] = {
        name: {
            "tokens_per_second": ratio(*tokens_and_seconds(decoded)),
            "over_plain": _over(decoded, results["plain"]),
            "over_assisted_generation": _over(decoded, results[ASSISTED]),
            "mean_acceptance_length": _mean_acceptance_length(decoded),
        }
        for name, decoded in results.items()
    }
    speeds |= {name: {"tokens_per_second": None, "refused": reason} for name, reason in refused.items()}
    limits = {"speculative": _limit(config, pair, results["speculative"], results["plain"])}
    if config.compiled:
        for name in compiled:
            speeds[name]["over_plain_compiled"] = _over(results[name], results["plain, compiled"])
            speeds[name]["over_assisted_generation_compiled"] = _over(results[name], results[f"{ASSISTED}, compiled"])
        with_compiled = results["speculative, compiled"], results["plain, compiled"]
        limits["speculative, compiled"] = _limit(config, pair, *with_compiled, compiled=True)
    ours, rows = ("plain", "speculative"), config.batch_size
    alone, batches = [(ids,) for ids in pair.prompts[:4]], [_together(pair.prompts, rows)] * 4
    return {
        "environment": environment(pair.target.device, pair.dtype),
        "methods": speeds,
        "outside_forwards": {
            **{name: _share_outside_forwards(method, pair, alone) for name, method in eager.items()},
            **{f"{name}, batch of {rows}": _share_outside_forwards(eager[name], pair, batches) for name in ours},
        },
        "limit": limits,
        "batch": {name: _batch(config, eager[name], pair.prompts) for name in ours},
    }


def _over(results: Sequence[Decoded], others: Sequence[Decoded]) -> Estimate:
    """Return the ratio of two methods' tokens per second, with an interval over prompts."""
    return ratio_product(*tokens_and_seconds(results), *tokens_and_seconds(others)[::-1])


def _mean_acceptance_length(results: Sequence[Decoded]) -> float | None:
    return sum((result.counts for result in results), Counts()).mean_acceptance_length()


def _assisted(pair: BenchmarkPair, draft_length: int, ids: Tensor, **options: Any) -> DecodeOutput:
    """Decode with the draft by the library's own loop, which counts nothing: γ is constant, and it is never unsure."""
    settings = {"num_assistant_tokens": draft_length, "num_assistant_tokens_schedule": "constant"}
    pair.draft.generation_config.update(**settings, assistant_confidence_threshold=0.0)
    generate: Any = pair.target.generate
    options = {"attention_mask": torch.ones_like(ids), "assistant_model": pair.draft, **pair.options, **options}
    return DecodeOutput(generate(ids, **options), Counts(), ())


class _Compiled:
    """Assisted generation with the forwards of both models compiled by `torch.compile`, as users do it.

    Their shapes are symbols, or each length of the dynamic cache would be compiled. PyTorch's limit of eight
    compilations, which both models have together, is lifted: beyond it forwards are eager.
    """

    def __init__(self, pair: BenchmarkPair, assisted: Method):
        self._assisted = assisted
        self._forwards = [(model, torch.compile(model.forward, dynamic=True)) for model in (pair.target, pair.draft)]

    def __call__(self, ids: Tensor) -> DecodeOutput:
        """Decode a prompt, (1, T); the models' own forwards are back afterwards."""
        for model, forward in self._forwards:
            vars(model)["forward"] = forward
        limits: Any = dynamo_config
        try:
            with limits.patch(recompile_limit=COMPILATIONS):
                return self._assisted(ids)
        finally:
            for model, _ in self._forwards:
                del vars(model)["forward"]


def _refusal(method: Method, ids: Tensor) -> str | None:
    """Return why the library does not decode a prompt so; None where it does."""
    try:
        method(ids)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).strip().strip('`')}"
    return None


def _together(prompts: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Return `count` prompts as one batch and its mask, (B, T) each."""
    rows = (list(prompts) * count)[:count]
    return left_padded([ids[0].tolist() for ids in rows], rows[0].device)


def _share_outside_forwards(
    decode: Callable[..., DecodeOutput], pair: BenchmarkPair, batches: Sequence[tuple[Tensor, ...]]
) -> float:
    """Return the share of the time that is spent outside the models' eager forwards, the median over batches."""
    shares = []
    for batch in batches:
        edges: list[float] = []  # where forwards begin and end, by turns

        def note(*_: Any, edges: list[float] = edges) -> None:
            edges.append(now())

        with contextlib.ExitStack() as hooks:
            for model in (pair.target, pair.draft):
                hooks.enter_context(model.register_forward_pre_hook(note))
                hooks.enter_context(model.register_forward_hook(note))
            seconds, _ = timed(partial(decode, *batch))
        shares.append(1 - (sum(edges[1::2]) - sum(edges[::2])) / seconds)
    return median_high(shares)


def _limit(
    config: BenchDecodeConfig,
    pair: BenchmarkPair,
    speculative: Sequence[Decoded],
    plain: Sequence[Decoded],
    compiled: bool = False,
) -> dict[str, Any]:
    """Compare the speed-up with τ·t(1) ÷ (d(γ) + t(γ + 1)): a loop that costs nothing, forwards as measured."""
    middle = config.max_prompt_tokens + config.max_new_tokens // 2  # where a forward costs what it does on average
    seconds = partial(verification_costs, rows=1, context=middle, repeats=40, compiled=compiled)
    of_target, step = seconds(pair.target, tokens=(1, config.draft_length + 1)), seconds(pair.draft, tokens=(1,))[1]
    one, block = of_target[1], of_target[config.draft_length + 1]
    tau, speedup = _mean_acceptance_length(speculative) or 0.0, _over(speculative, plain)
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
        "together": partial(decode, *_together(prompts, count)),
        "alone": lambda: [decode(ids) for ids in rows],
    }
    turns = [in_turns(calls, turn) for turn in range(4)][1:]  # the first warms up
    together, alone = ([turn[name][0] for turn in turns] for name in calls)
    ratios = [apart / joint for joint, apart in zip(together, alone, strict=True)]
    texts = [row[-new:] for row in turns[-1]["together"][1].sequences]
    same = sum(map(torch.equal, texts, (one.sequences[0, -new:] for one in turns[-1]["alone"][1])))
    return {
        "tokens_per_second": count * new / median_high(together),
        "over_one_row_at_a_time": {"value": median_high(ratios), "range": [min(ratios), max(ratios)]},
        "rows_identical": f"{same} of {count}",
    }


if __name__ == "__main__":
    main(BenchDecodeConfig, bench)
