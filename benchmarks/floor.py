"""`python -m benchmarks.floor`: compiled decoding against its matrix products alone.

No decoder of a model is faster than its products. For plain decoding and for each drafter it reports a round's time,
what of it passes inside the compiled calls, and what the same products take alone, one after the other.
"""

from dataclasses import dataclass, field
from statistics import mode
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import GenerationConfig

from benchmarks.common import ASSETS, BenchmarkConfig, main
from benchmarks.timing import TEXT, UNCOUNTED, Decode, check_rounds, methods, options_at, prompts, timed_rounds
from draftsmith.decode.clock import least_seconds
from draftsmith.decode.errors import at_least, require
from draftsmith.scripts.kinds import drafter_specs
from draftsmith.scripts.pair import load_pair
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import environment

REPEATS = 50
"""Timings of a round's products, of which the least counts."""
Product = tuple[nn.Linear, int]
"""A layer, and the rows that it multiplies."""


@dataclass
class BenchFloorConfig(BenchmarkConfig):
    """Time compiled decoding against its matrix products alone."""

    target: str = str(ASSETS / "tiny-target")
    drafter: list[str] = field(default_factory=lambda: [str(ASSETS / "tiny-draft")])
    """`[NAME=]DIR_OR_KIND`, repeatable."""
    draft_length: int = 3
    """γ of what has no length of its own."""
    dtype: str = "float32"
    temperature: list[float] = field(default_factory=lambda: [0.0, 1.0])
    max_new_tokens: int = 96
    repeats: int = 7
    """Texts decoded by each method, in turns."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(1), "draft_length", "max_new_tokens", "repeats")


def usual_products(method: Decode) -> tuple[Product, ...]:
    """Return the products of the most frequent round of a text that an eager method decodes, prompt left out."""
    made: list[list[Product]] = [[]]

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, nn.Linear):
            made[-1].append((module, inputs[0].shape[:-1].numel()))

    hook = register_module_forward_pre_hook(note)
    try:
        method(lambda _: made.append([]))
    finally:
        hook.remove()
    check_rounds(whole := made[1 + UNCOUNTED : -1])
    return mode(map(tuple, whole))


@torch.inference_mode()
def products_seconds(products: tuple[Product, ...]) -> float:
    """Return the least seconds of products, one after the other."""
    given = [(layer.weight, torch.randn(rows, layer.in_features, dtype=layer.weight.dtype)) for layer, rows in products]
    return least_seconds({"": lambda: [nn.functional.linear(rows, weight) for weight, rows in given]}, REPEATS)[""]


def bench(config: BenchFloorConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures."""
    tokenizer = load_tokenizer(config.target, field="target")
    pair = load_pair(config.target, tokenizer, drafter_specs(config.drafter, [config.draft_length]), config.dtype)
    pair.target.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id)
    ids, rounds = prompts(tokenizer.encode(TEXT), 1), {}
    for temperature in config.temperature:
        options = options_at(temperature, config.max_new_tokens)
        eager = methods(pair.target, pair.drafters, ids, options)
        compiled = methods(pair.target, pair.drafters, ids, options | {"compiled": True})
        for name, figures in timed_rounds(compiled, config.repeats).items():
            floor = 1e3 * products_seconds(usual_products(eager[name]))
            over = {"products_ms": floor, "over_products": figures["round_ms"] / floor}
            rounds[f"{name}, T = {temperature:g}"] = figures | over
    return {"environment": environment(torch.device("cpu"), config.dtype), "rounds": rounds}


if __name__ == "__main__":
    main(BenchFloorConfig, bench)
