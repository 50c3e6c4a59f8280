"""`python -m draftsmith.scripts.bench.attention`: a forward over drafted tokens behind a long text.

Through attention in groups, and through the library's `sdpa`, which repeats the cache; by turns, on the same cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftsmith.decode.cache import CachedModel, check_rollback
from draftsmith.decode.cache.attention import NAME, attends_in_groups, grouped_attention
from draftsmith.decode.clock import timed
from draftsmith.decode.errors import InputError
from draftsmith.scripts.bench.common import BenchmarkConfig, in_turns, main
from draftsmith.train.models import load_model


@dataclass
class BenchAttentionConfig(BenchmarkConfig):
    """Time what verifying drafted tokens costs behind texts of some lengths."""

    target: str
    """The target: a model directory or hub id, whose query heads share key heads."""
    context: list[int] = field(default_factory=lambda: [1024, 2048])
    """Tokens before the drafted ones."""
    tokens: int = 5
    """Tokens of a forward: γ + 1."""
    rows: int = 1
    """Texts verified together."""
    repeats: int = 15
    """Turns; figures are medians over them."""
    dtype: str = "float32"
    """Weights and arithmetic."""


def bench(config: BenchAttentionConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures."""
    model = load_model(config.target, dtype=config.dtype, field="target")
    check_rollback(model, "target")
    if not attends_in_groups(model):
        raise InputError(
            f"target: expected a model whose query heads share key heads under sdpa, found {config.target}"
        )
    figures = {f"{context} tokens": _behind(model, context, config) for context in config.context}
    return {"forward": figures}


@torch.inference_mode()
def _behind(model: Any, context: int, config: BenchAttentionConfig) -> dict[str, float]:
    """Return milliseconds of a forward, and of its attention alone, both ways, and the ratios."""
    ids = torch.randint(model.config.get_text_config().vocab_size, (config.rows, context + config.tokens))
    cached = CachedModel(model, config.rows, context, block=config.tokens)
    cached.prefill(ids[:, :context].to(model.device))
    block, starts = ids[:, context:].to(model.device), [context] * config.rows
    feed = partial(cached.feed, block, starts)
    inside: dict[str, list[float]] = {"grouped": [], "library": []}
    whole: dict[str, list[float]] = {"grouped": [], "library": []}

    def run_by(name: str) -> None:
        with _attending(name == "grouped", inside[name]):
            feed()

    for turn in range(config.repeats + 2):
        for name, (seconds, _) in in_turns({name: partial(run_by, name) for name in whole}, turn).items():
            whole[name].append(seconds)
    parts = {"forward": whole, "attention": inside}
    figures = {
        f"{part} {name} ms": 1e3 * median(seconds[name][2:]) for part, seconds in parts.items() for name in seconds
    }
    for part, taken in parts.items():
        ratios = [slow / fast for slow, fast in zip(taken["library"][2:], taken["grouped"][2:], strict=True)]
        figures[f"{part} ratio"] = median(ratios)
    return figures


@contextmanager
def _attending(in_groups: bool, seconds: list[float]) -> Iterator[None]:
    """Let forwards attend in groups or by the library, and note the seconds that their attention takes."""
    attend = grouped_attention if in_groups else sdpa_attention_forward
    total = 0.0

    def timed_attention(*args: Any, **kwargs: Any) -> Any:
        nonlocal total
        passed, result = timed(partial(attend, *args, **kwargs))
        total += passed
        return result

    AttentionInterface.register(NAME, timed_attention)
    try:
        yield
    finally:
        AttentionInterface.register(NAME, grouped_attention)
    seconds.append(total)


if __name__ == "__main__":
    main(BenchAttentionConfig, bench)
