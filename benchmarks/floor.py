"""`python -m benchmarks.floor`: compiled decoding against its matrix products alone.

No decoder of a model is faster than its products. For plain decoding and for each drafter it reports a round's time,
what of it passes inside the compiled calls, and what the products of its forwards take alone, as programs compute them.
Median of several decoded texts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median, mode
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import GenerationConfig, PreTrainedModel

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

REPEATS = 10
"""Timings of a round's products between two texts."""


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
    """The products of some linear layers of a model, one after the other.

    Args:
        layers: names of linear layers, each with its index in `rows`; layers that are one product go by the first.
    """

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


@dataclass(frozen=True)
class Product:
    """One product of a round."""

    model: int
    """The place of its model among those that multiply."""
    group: int
    """The place of its layers in the model's `groups`."""
    rows: int


class Products:
    """The matrix products in rounds of a target and its drafters.

    They are recorded from eager rounds, which make the same products as compiled ones, for any kind of drafter. Weights
    that two models share count as the first model's.
    """

    def __init__(self, models: Sequence[PreTrainedModel]):
        self._models = list(models)
        self._groups = [list(groups(model)) for model in self._models]
        self._of_layer: dict[nn.Module, tuple[int, int]] = {}
        for place, of_model in enumerate(self._groups):
            for index, group in enumerate(of_model):
                self._of_layer.setdefault(group.layers[0], (place, index))

    @contextmanager
    def noting(self, note: Callable[[Product], None]) -> Iterator[None]:
        """Call `note` with each product that is made in this block, by eager forwards."""

        def begin(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if (place := self._of_layer.get(module)) is not None:
                note(Product(*place, inputs[0].shape[:-1].numel()))

        hook = register_module_forward_pre_hook(begin)
        try:
            yield
        finally:
            hook.remove()

    def rounds(self, method: Decode) -> list[list[Product]]:
        """Return the products of each round of a text that an eager method decodes, without those of the prompt."""
        made: list[list[Product]] = [[]]
        with self.noting(lambda product: made[-1].append(product)):
            method(lambda _: made.append([]))
        check_rounds(whole := made[1 + UNCOUNTED : -1])
        return whole

    @torch.inference_mode()
    def block(self, tokens: int) -> list[Product]:
        """Return the products of the target's forward over a block of tokens."""
        made: list[Product] = []
        with self.noting(made.append):
            self._models[0](torch.zeros(1, tokens, dtype=torch.long))
        return made

    def seconds(self, made: Sequence[Product]) -> float:
        """Return the seconds of products, the least of `REPEATS`."""
        return sum(self._part_seconds(part) for part in _parts(made))

    @torch.inference_mode()
    def _part_seconds(self, part: Sequence[Product]) -> float:
        model, of_model = self._models[part[0].model], self._groups[part[0].model]
        firsts = [of_model[product.group].layers[0].get_parameter("weight") for product in part]
        shapes = [(product.rows, weight.shape[1]) for product, weight in zip(part, firsts, strict=True)]
        # Drafters often read several tokens and compute the logits of one: no other program for that.
        inputs_of = [(shape, index == len(part) - 1) for index, shape in enumerate(shapes)]
        rows = {given: torch.randn(given[0], dtype=model.dtype) for given in inputs_of}
        order = list(rows)
        names = [of_model[product.group].path for product in part]
        layers = [(name, order.index(given)) for name, given in zip(names, inputs_of, strict=True)]
        inputs = [list(rows.values())]
        program = Programs.of(model).get(ProductsForward(model, layers), inputs)
        return least_seconds({"": lambda: program(*inputs)}, REPEATS)[""]


def _parts(made: Sequence[Product]) -> list[tuple[Product, ...]]:
    """Cut products into runs of one model in which no layers multiply twice: a program each."""
    parts: list[list[Product]] = []
    for product in made:
        if (
            not parts
            or parts[-1][0].model != product.model
            or any(before.group == product.group for before in parts[-1])
        ):
            parts.append([])
        parts[-1].append(product)
    return [tuple(part) for part in parts]


def bench(config: BenchFloorConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures."""
    tokenizer = load_tokenizer(config.target, field="target")
    specs = drafter_specs(config.drafter, [config.draft_length])
    pair = load_pair(config.target, tokenizer, specs, config.dtype)
    pair.target.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id)
    target, ids = pair.target, prompts(tokenizer.encode(TEXT), 1)
    models = [target, *(drafter.model for drafter in pair.drafters if drafter.model is not None)]
    products = Products(models)
    rounds = {}
    for temperature in config.temperature:
        options = options_at(temperature, config.max_new_tokens)
        made = {
            name: mode(map(tuple, products.rounds(eager)))
            for name, eager in methods(target, pair.drafters, ids, options).items()
        }
        alone: dict[str, list[float]] = {name: [] for name in made}

        def time_products(name: str, made: dict[str, Any] = made, alone: Any = alone) -> None:
            alone[name].append(1e3 * products.seconds(made[name]))

        compiled = methods(target, pair.drafters, ids, options | {"compiled": True})
        for name, figures in timed_rounds(compiled, config.repeats, time_products).items():
            floor = median(alone[name])
            over = {"products_ms": floor, "over_products": figures["round_ms"] / floor}
            rounds[f"{name}, T = {temperature:g}"] = figures | over
    return {"environment": environment(torch.device("cpu"), config.dtype), "rounds": rounds}


if __name__ == "__main__":
    main(BenchFloorConfig, bench)
