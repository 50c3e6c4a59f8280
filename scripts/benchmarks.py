"""What the benchmarks share: prompts, methods timed in turns, ratios of their speeds, and what a forward costs."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode import Counts
from draftsmith.decode.cache import CachedModel
from draftsmith.decode.intervals import rate_ratio, ratio
from draftsmith.train.corpus import code_prompts, stdlib_modules
from draftsmith.train.models import default_device
from draftsmith.train.prompts import encode_prompt, read_prompts

ASSETS = Path(__file__).resolve().parents[1] / "assets"

Result = tuple[float, int, Counts | None]
"""Seconds, tokens and counts of one decoded prompt."""


def benchmark_prompts(
    source: str | None, limit: int | None, max_tokens: int, tokenizer: PreTrainedTokenizerBase
) -> list[Tensor]:
    """Return prompts of a source as `read_prompts` takes it, or of held-out modules of the standard library, (1, T).

    Args:
        source: a file of prompts; the standard library's modules if None.
        limit: take the first so many; all if None, or 128 of the standard library.
        max_tokens: keep the last so many tokens of a longer prompt.
        tokenizer: the target's.
    """
    if source is not None:
        encoded = [encode_prompt(p, tokenizer, max_tokens=max_tokens) for p in read_prompts(source, limit=limit)]
    else:
        records = code_prompts([m for m in stdlib_modules() if m.heldout], limit or 128, seed=1)
        encoded = [tokenizer(record["prompt"])["input_ids"][-max_tokens:] for record in records]
    return [torch.tensor([ids], device=default_device()) for ids in encoded]


def interleaved(methods: dict[str, Callable[[Tensor], Any]], prompts: list[Tensor]) -> dict[str, list[Result]]:
    """Decode each prompt by every method before the next prompt's turn, in an order that rotates."""
    for decode in tqdm(methods.values(), desc="warm up", unit="method"):
        decode(prompts[0])
    names = list(methods)
    results: dict[str, list[Result]] = {name: [] for name in methods}
    for i, ids in enumerate(tqdm(prompts, desc="decode", unit="prompt")):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds, output = timed(lambda name=name, ids=ids: methods[name](ids))  # type: ignore[misc]
            sequences = output if isinstance(output, Tensor) else output.sequences
            counts = None if isinstance(output, Tensor) else output.counts
            results[name].append((seconds, sequences.numel() - ids.numel(), counts))
    return results


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a call took, its device's work included, and its result."""
    _synchronize()
    start = time.perf_counter()
    output = call()
    _synchronize()
    return time.perf_counter() - start, output


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def over(seen: list[Result], other: list[Result]) -> dict[str, Any]:
    """Return the ratio of two methods' tokens per second, with an interval over prompts."""
    return rate_ratio(
        [n for _, n, _ in seen], [s for s, _, _ in seen], [n for _, n, _ in other], [s for s, _, _ in other]
    )


def summary(seen: list[Result], plain: list[Result]) -> dict[str, Any]:
    """Return a method's speed, alone and against plain decoding, and its τ."""
    counts = [c for _, _, c in seen if c is not None]
    total = sum(counts, Counts())
    return {
        "tokens_per_second": ratio([n for _, n, _ in seen], [s for s, _, _ in seen]),
        "over_plain": over(seen, plain),
        "mean_acceptance_length": total.mean_acceptance_length(),
    }


@torch.inference_mode()
def forward_costs(
    target: PreTrainedModel, draft: PreTrainedModel, draft_length: int, length: int, compiled: bool = False
) -> tuple[float, float, float]:
    """Return the median seconds of target forwards of 1 and γ + 1 tokens and of a draft step, taken in turns.

    All are taken behind a text of `length` tokens.
    """
    block = draft_length + 1
    calls: list[tuple[CachedModel, Tensor]] = []
    for model, k in ((target, 1), (target, block), (draft, 1)):
        cached = CachedModel(model, 1, length, block=block, compiled=compiled)
        cached.prefill(torch.ones(1, length, dtype=torch.long, device=model.device))
        calls.append((cached, torch.ones(1, k, dtype=torch.long, device=model.device)))
    seconds: list[list[float]] = [[] for _ in calls]
    for repeat in range(45):
        for own, (cached, tokens) in zip(seconds, calls, strict=True):
            elapsed, _ = timed(lambda cached=cached, tokens=tokens: cached.feed(tokens, [length])[0, 0, 0].item())  # type: ignore[misc]
            if repeat >= 5:
                own.append(elapsed)
    t1, tk, d = (sorted(own)[len(own) // 2] for own in seconds)
    return t1, tk, d


def interval(estimate: dict[str, Any] | None) -> str:
    """Write a ratio with its interval."""
    if estimate is None or estimate["value"] is None:
        return ""
    bounds = estimate.get("ci95")
    return f"{estimate['value']:.2f}×" + (f" [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else "")
