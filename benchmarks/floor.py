"""`python -m benchmarks.floor`: compiled decoding against its matrix products alone.

No decoder of a model is faster than its products. For plain decoding and for each drafter it reports a round's time,
what of it passes inside the compiled calls, and what its products take alone, as programs compute them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mode
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import GenerationConfig

from benchmarks.common import ASSETS, BenchmarkConfig, main
from benchmarks.timing import TEXT, UNCOUNTED, Decode, check_rounds, methods, options_at, prompts, timed_rounds
from draftsmith.decode.cache.forward import Forward
from draftsmith.decode.cache.program import Programs
from draftsmith.decode.cache.weights import groups
from draftsmith.decode.clock import least_seconds
from draftsmith.decode.errors import at_least, require
from draftsmith.scripts.kinds import drafter_specs
from draftsmith.scripts.pair import load_pair
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import environment

REPEATS = 50
"""Timings of a round's products; the least counts."""
Product = tuple[int, str, int]
"""The place of a model, a layer, and the rows that it multiplies."""


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


class ProductsForward(Forward):
    """Products of a model's linear layers: names, each with its index in `rows`; joined layers go by the first."""

    sources = (__file__,)

    def __init__(self, model: nn.Module, layers: Sequence[tuple[str, int]]):
        super().__init__(model, tuple(layers))
        self._layers = list(layers)

    @property
    def title(self) -> str:
        """The text of the progress line."""
        return f"{len(self._layers)} products of {type(self.model).__name__}"

    def axes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the axes of each input that vary."""
        return ([{0: "k"} for _ in inputs[0]],)

    def forward(self, rows: list[Tensor]) -> list[Tensor]:
        """Multiply rows, (K, width) each; return something of each product."""
        model: Any = self.model
        return [model.get_submodule(name)(rows[place])[:, :1] for name, place in self._layers]


def usual_products(method: Decode, models: Sequence[nn.Module]) -> tuple[Product, ...]:
    """Return the products of the most frequent round of a text that an eager method decodes, prompt left out.

    A compiled round makes the same ones. Weights that two models share count as the first model's.
    """
    paths: dict[nn.Module, tuple[int, str]] = {}
    for place, model in enumerate(models):
        for group in groups(model):
            paths.setdefault(group.layers[0], (place, group.path))
    made: list[list[Product]] = [[]]

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if module in paths:
            made[-1].append((*paths[module], inputs[0].shape[:-1].numel()))

    hook = register_module_forward_pre_hook(note)
    try:
        method(lambda _: made.append([]))
    finally:
        hook.remove()
    check_rounds(whole := made[1 + UNCOUNTED : -1])
    return mode(map(tuple, whole))


@torch.inference_mode()
def products_seconds(products: Sequence[Product], models: Sequence[nn.Module]) -> float:
    """Return the least seconds of products, one after the other, in a program for each model."""
    seconds = 0.0
    for place, model in enumerate(models):
        of_model = [(path, rows) for index, path, rows in products if index == place]
        weights = [model.get_submodule(path).get_parameter("weight") for path, _ in of_model]
        shapes = [(rows, weight.shape[1]) for (_, rows), weight in zip(of_model, weights, strict=True)]
        inputs = [[torch.randn(shape, dtype=weights[0].dtype) for shape in dict.fromkeys(shapes)]]
        order = list(dict.fromkeys(shapes))
        layers = [(path, order.index(shape)) for (path, _), shape in zip(of_model, shapes, strict=True)]
        if layers:
            program = Programs.of(model).get(ProductsForward(model, layers), inputs)
            seconds += least_seconds({"": partial(program, *inputs)}, REPEATS)[""]
    return seconds


def bench(config: BenchFloorConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures."""
    tokenizer = load_tokenizer(config.target, field="target")
    pair = load_pair(config.target, tokenizer, drafter_specs(config.drafter, [config.draft_length]), config.dtype)
    pair.target.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id)
    models = [pair.target, *(drafter.model for drafter in pair.drafters if drafter.model is not None)]
    ids, rounds = prompts(tokenizer.encode(TEXT), 1), {}
    for temperature in config.temperature:
        options = options_at(temperature, config.max_new_tokens)
        eager = methods(pair.target, pair.drafters, ids, options)
        compiled = methods(pair.target, pair.drafters, ids, options | {"compiled": True})
        for name, figures in timed_rounds(compiled, config.repeats).items():
            floor = 1e3 * products_seconds(usual_products(eager[name], models), models)
            over = {"products_ms": floor, "over_products": figures["round_ms"] / floor}
            rounds[f"{name}, T = {temperature:g}"] = figures | over
    return {"environment": environment(torch.device("cpu"), config.dtype), "rounds": rounds}


if __name__ == "__main__":
    main(BenchFloorConfig, bench)
