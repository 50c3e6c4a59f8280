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
from transformers import PreTrainedModel

from draftsmith.decode import Counts, DecodeOutput, DraftModelProposer, autoregressive_generate, speculative_generate
from draftsmith.scripts.bench import common
from draftsmith.scripts.bench.common import Decoded, DecodingConfig, timed
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


@dataclass(frozen=True)
class Decoder:
    """A pair and its ways of decoding prompts, (B, T)."""

    config: BenchDecodeConfig
    target: PreTrainedModel
    draft: PreTrainedModel

    def plain(self, ids: Tensor, mask: Tensor | None = None, compiled: bool = False) -> DecodeOutput:
        """Decode one token per forward."""
        return autoregressive_generate(self.target, ids, mask, compiled=compiled, **self.config.options)

    def speculative(self, ids: Tensor, mask: Tensor | None = None, compiled: bool = False) -> DecodeOutput:
        """Decode with the draft."""
        proposer, options = DraftModelProposer(self.draft), self.config.options
        return speculative_generate(
            self.target, proposer, ids, mask, self.config.draft_length, compiled=compiled, **options
        )

    def assisted(self, ids: Tensor) -> DecodeOutput:
        """Decode with the draft by the library's own loop, which counts nothing."""
        generate: Any = self.target.generate
        options = {"attention_mask": torch.ones_like(ids), "assistant_model": self.draft, **self.config.options}
        return DecodeOutput(generate(ids, **options), Counts(), ())


def bench(config: BenchDecodeConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures."""
    target, draft, prompts = common.load_pair(config)
    draft.generation_config.update(
        num_assistant_tokens=config.draft_length,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    decoder = Decoder(config, target, draft)
    methods: dict[str, Method] = {"plain": decoder.plain, "speculative": decoder.speculative}
    if config.peer:
        methods["assisted generation"] = decoder.assisted
    clocked_methods = list(methods.items())
    if config.compiled:
        methods["plain, compiled"] = partial(decoder.plain, compiled=True)
        methods["speculative, compiled"] = partial(decoder.speculative, compiled=True)
    results = common.decode_in_turns(methods, prompts)
    speeds = {name: common.summary(result, results["plain"]) for name, result in results.items()}
    if config.peer:
        for name, result in results.items():
            speeds[name]["over_assisted_generation"] = common.over(result, results["assisted generation"])
    if config.compiled:
        speedup = common.over(results["speculative, compiled"], results["plain, compiled"])
        speeds["speculative, compiled"]["over_plain_compiled"] = speedup
    outside = {name: _share_outside_forwards(method, (target, draft), prompts[:4]) for name, method in clocked_methods}
    figures = {
        "environment": environment(target.device, config.dtype),
        "config": vars(config),
        "methods": speeds,
        "outside_forwards": outside,
        "limit": _limits(decoder, results),
    }
    return figures | ({"batch": _batches(decoder, prompts)} if config.batch_size > 1 else {})


def _share_outside_forwards(decode: Method, models: Sequence[PreTrainedModel], prompts: list[Tensor]) -> float:
    """Return the share of the time that is spent outside the models' eager forwards, the median over prompts."""
    shares = []
    for ids in prompts:
        edges: list[float] = []  # where forwards begin and end, by turns

        def note(*_: Any, edges: list[float] = edges) -> None:
            edges.append(common.clock())

        with contextlib.ExitStack() as hooks:
            for model in models:
                hooks.enter_context(model.register_forward_pre_hook(note))
                hooks.enter_context(model.register_forward_hook(note))
            seconds, _ = timed(partial(decode, ids))
        shares.append(1 - (sum(edges[1::2]) - sum(edges[::2])) / seconds)
    return median_high(shares)


def _limits(decoder: Decoder, results: dict[str, list[Decoded]]) -> dict[str, Any]:
    """Compare the speed-ups with τ·t(1) ÷ (d(γ) + t(γ + 1)): a loop that costs nothing, forwards as measured."""
    draft_length, limits = decoder.config.draft_length, {}
    for suffix in ("", ", compiled") if decoder.config.compiled else ("",):
        speculative, plain = results[f"speculative{suffix}"], results[f"plain{suffix}"]
        one, block, step = common.forward_seconds(
            decoder.target, decoder.draft, draft_length, decoder.config.middle, compiled=bool(suffix)
        )
        limit = (common.mean_acceptance_length(speculative) or 0.0) * one / (draft_length * step + block)
        speedup = common.over(speculative, plain)
        limits[f"speculative{suffix}"] = {
            "target_milliseconds": {"1": 1e3 * one, str(draft_length + 1): 1e3 * block},
            "draft_step_milliseconds": 1e3 * step,
            "limit": limit,
            "speedup": speedup,
            "share_of_limit": (speedup.value or float("nan")) / limit,
        }
    return limits


def _batches(decoder: Decoder, prompts: list[Tensor]) -> dict[str, Any]:
    """Compare tokens per second of `batch_size` rows together with those of one row at a time, taken in turns."""
    count, new = decoder.config.batch_size, decoder.config.max_new_tokens
    rows = (prompts * count)[:count]
    batch, mask = common.padded(rows)
    figures: dict[str, Any] = {"batch_size": count}
    for name, decode in (("plain", decoder.plain), ("speculative", decoder.speculative)):
        calls: dict[str, Callable[[], Any]] = {
            "together": partial(decode, batch, mask),
            "alone": lambda decode=decode: [decode(ids) for ids in rows],  # type: ignore[misc]
        }
        turns = [common.in_turns(calls, turn) for turn in range(4)]
        seconds = {way: [turn[way][0] for turn in turns[1:]] for way in calls}  # the first turn warms up
        ratios = [alone / together for together, alone in zip(*seconds.values(), strict=True)]
        together, alone = (turns[-1][way][1] for way in calls)
        pairs = zip(together.sequences, alone, strict=True)
        same = sum(torch.equal(row[-new:], single.sequences[0, -new:]) for row, single in pairs)
        figures[name] = {
            "tokens_per_second": count * new / median_high(seconds["together"]),
            "over_one_row_at_a_time": {"value": median_high(ratios), "range": [min(ratios), max(ratios)]},
            "rows_identical": f"{same} of {count}",
        }
    return figures


if __name__ == "__main__":
    sys.exit(run(partial(common.run_benchmark, BenchDecodeConfig, bench)))
