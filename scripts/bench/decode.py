"""`python -m draftsmith.scripts.bench.decode`: the decoder against the library's own, and against what it could be.

Every ratio is within one run: each prompt is decoded by every method before the next prompt's turn, in an order that
rotates. Plain decoding has the same options as what it is compared with: dtype, threads, compiled or not.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_high
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from draftsmith.decode import Counts, DecodeOutput
from draftsmith.decode.clock import now, timed
from draftsmith.decode.measurement.intervals import Estimate, rate_ratio, ratio
from draftsmith.decode.planner import verification_costs
from draftsmith.scripts.bench.common import BenchmarkPair, DecodingConfig, in_turns, run_benchmark
from draftsmith.scripts.pair import left_padded
from draftsmith.train.cli import run
from draftsmith.train.provenance import environment

Method = Callable[[Tensor], DecodeOutput]


@dataclass
class BenchDecodeConfig(DecodingConfig):
    """Time the decoder at T=0 beside plain decoding and the library's assisted generation."""

    draft_length: int = 3
    """γ, drafted tokens a round."""
    batch_size: int = 8
    """Rows decoded together, compared with one row at a time."""
    compiled: bool = True
    """Also time compiled forwards, after minutes of compilation."""


class Decoded(NamedTuple):
    """One decoded prompt."""

    seconds: float
    tokens: int
    counts: Counts


def bench(config: BenchDecodeConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures."""
    pair = BenchmarkPair.load(config)
    plain, speculative = pair.plain, partial(pair.speculative, draft_length=config.draft_length)
    eager: dict[str, Method] = {"plain": plain, "speculative": speculative}
    eager["assisted generation"] = partial(_assisted, pair, config.draft_length)
    compiled: dict[str, Method] = {}
    if config.compiled:
        compiled["plain, compiled"] = partial(plain, compiled=True)
        compiled["speculative, compiled"] = partial(speculative, compiled=True)
    results = _decode_in_turns(eager | compiled, pair.prompts)
    speeds: dict[str, dict[str, Any]] = {
        name: {
            "tokens_per_second": ratio(*_tokens_and_seconds(decoded)),
            "over_plain": _over(decoded, results["plain"]),
            "over_assisted_generation": _over(decoded, results["assisted generation"]),
            "mean_acceptance_length": _mean_acceptance_length(decoded),
        }
        for name, decoded in results.items()
    }
    limits = {"speculative": _limit(config, pair, results["speculative"], results["plain"])}
    if config.compiled:
        with_compiled = results["speculative, compiled"], results["plain, compiled"]
        speeds["speculative, compiled"]["over_plain_compiled"] = _over(*with_compiled)
        limits["speculative, compiled"] = _limit(config, pair, *with_compiled, compiled=True)
    return {
        "environment": environment(pair.target.device, pair.dtype),
        "config": vars(config),
        "methods": speeds,
        "outside_forwards": {
            **{name: _share_outside_forwards(method, pair, pair.prompts[:4]) for name, method in eager.items()},
            **{
                f"{name}, batch of {config.batch_size}": _share_outside_forwards(
                    eager[name], pair, [_together(pair.prompts, config.batch_size)] * 4
                )
                for name in ("plain", "speculative")
            },
        },
        "limit": limits,
        "batch": {name: _batch(config, eager[name], pair.prompts) for name in ("plain", "speculative")},
    }


def _decode_in_turns(methods: Mapping[str, Method], prompts: list[Tensor]) -> dict[str, list[Decoded]]:
    """Decode each prompt by every method before the next prompt's turn, in an order that rotates."""
    for decode in tqdm(methods.values(), desc="warm up", unit="method"):
        decode(prompts[0])
    results: dict[str, list[Decoded]] = {name: [] for name in methods}
    for turn, ids in enumerate(tqdm(prompts, desc="decode", unit="prompt")):
        calls = {name: partial(decode, ids) for name, decode in methods.items()}
        for name, (seconds, output) in in_turns(calls, turn).items():
            results[name].append(Decoded(seconds, output.sequences.numel() - ids.numel(), output.counts))
    return results


def _over(results: Sequence[Decoded], others: Sequence[Decoded]) -> Estimate:
    """Return the ratio of two methods' tokens per second, with an interval over prompts."""
    return rate_ratio(*_tokens_and_seconds(results), *_tokens_and_seconds(others))


def _tokens_and_seconds(results: Sequence[Decoded]) -> tuple[list[int], list[float]]:
    return [result.tokens for result in results], [result.seconds for result in results]


def _mean_acceptance_length(results: Sequence[Decoded]) -> float | None:
    return sum((result.counts for result in results), Counts()).mean_acceptance_length()


def _assisted(pair: BenchmarkPair, draft_length: int, ids: Tensor) -> DecodeOutput:
    """Decode with the draft by the library's own loop, which counts nothing: γ is constant, and it is never unsure."""
    settings = {"num_assistant_tokens": draft_length, "num_assistant_tokens_schedule": "constant"}
    pair.draft.generation_config.update(**settings, assistant_confidence_threshold=0.0)
    generate: Any = pair.target.generate
    options = {"attention_mask": torch.ones_like(ids), "assistant_model": pair.draft, **pair.options}
    return DecodeOutput(generate(ids, **options), Counts(), ())


def _together(prompts: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Return so many prompts as one batch and its mask, (B, T) each."""
    rows = (list(prompts) * count)[:count]
    return left_padded([ids[0].tolist() for ids in rows], rows[0].device)


def _share_outside_forwards(
    decode: Callable[..., DecodeOutput], pair: BenchmarkPair, prompts: Sequence[Tensor | tuple[Tensor, Tensor]]
) -> float:
    """Return the share of the time that is spent outside the models' eager forwards, the median over the prompts."""
    shares = []
    for prompt in prompts:
        batch = (prompt,) if isinstance(prompt, Tensor) else prompt
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
    same = sum(
        torch.equal(text, one.sequences[0, -new:]) for text, one in zip(texts, turns[-1]["alone"][1], strict=True)
    )
    return {
        "tokens_per_second": count * new / median_high(together),
        "over_one_row_at_a_time": {"value": median_high(ratios), "range": [min(ratios), max(ratios)]},
        "rows_identical": f"{same} of {count}",
    }


if __name__ == "__main__":
    sys.exit(run(partial(run_benchmark, BenchDecodeConfig, bench)))
