"""What the benchmarks share: a pair, prompts, methods timed in turns, ratios of speeds, and what a forward costs."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode import Counts
from draftsmith.decode.cache import CachedModel
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import Estimate, format_estimate, rate_ratio, ratio
from draftsmith.train.data.corpus import code_prompts, stdlib_modules
from draftsmith.train.data.prompts import encode_prompt, read_prompts
from draftsmith.train.models import default_device, load_model

ASSETS = Path(__file__).resolve().parents[2] / "assets"

Result = tuple[float, int, Counts | None]
"""Seconds, tokens and counts of one decoded prompt."""


@dataclass
class PairConfig:
    """What a benchmark of a pair's decoding is told, whatever it compares."""

    target: str = str(ASSETS / "tiny-target")
    """The target: a model directory or hub id."""
    draft: str = str(ASSETS / "tiny-draft")
    """A draft model with the target's tokenizer."""
    prompts: str | None = None
    """A file of prompts; held-out modules of the standard library if None."""
    limit: int = 16
    """Prompts decoded, by every method."""
    max_new_tokens: int = 96
    """Tokens of a completion; end-of-sequence tokens are passed over, so that every method writes as many."""
    max_prompt_tokens: int = 48
    """Keep the last so many tokens of a longer prompt."""
    dtype: str = "float32"
    """Weights and arithmetic of both models."""
    threads: int | None = None
    """CPU threads in all; torch's default if None."""
    output: str | None = None
    """A JSON file for the figures."""

    def __post_init__(self) -> None:
        self.require_counts("limit", "max_new_tokens", "max_prompt_tokens")

    def require_counts(self, *names: str) -> None:
        """Require that these fields are 1 or more."""
        for name in names:
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected at least 1, found {getattr(self, name)}")

    @property
    def options(self) -> dict[str, Any]:
        """How every method decodes: greedily, to one length."""
        return {"max_new_tokens": self.max_new_tokens, "do_sample": False}

    @property
    def middle(self) -> int:
        """A text's length in the middle of decoding, where forwards cost what they cost on average."""
        return self.max_prompt_tokens + self.max_new_tokens // 2


def load_pair(
    config: PairConfig, tokenizer: PreTrainedTokenizerBase, draft_device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedModel, list[Tensor]]:
    """Return a target that passes over ends of text, its draft, and the prompts, (1, T) each.

    Args:
        config: names them.
        tokenizer: the target's.
        draft_device: where the draft runs; where the target does if None.
    """
    target = load_model(config.target, field="target", dtype=config.dtype)
    draft = load_model(config.draft, field="draft", dtype=config.dtype, device=draft_device)
    target.generation_config.eos_token_id = None
    return target, draft, benchmark_prompts(config.prompts, config.limit, config.max_prompt_tokens, tokenizer)


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


def over(seen: list[Result], other: list[Result]) -> Estimate:
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
    t1, tk, d = map(median_high, seconds)
    return t1, tk, d


def interval(estimate: Estimate | None) -> str:
    """Write a ratio with its interval."""
    return format_estimate(estimate, unit="×", spread="interval")
