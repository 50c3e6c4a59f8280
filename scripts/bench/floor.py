"""`python -m draftsmith.scripts.bench.floor`: compiled decoding beside its matrix products alone.

No decoder of a model is faster than its products. For plain decoding and for each drafter it reports a round's time,
what of it passes inside the compiled calls, and the products of its forwards. Median of several decoded texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.decode.cache.forward import Forward
from draftsmith.decode.cache.program import Programs
from draftsmith.decode.cache.weights import groups, products
from draftsmith.decode.clock import median_seconds
from draftsmith.decode.errors import at_least, require
from draftsmith.scripts.bench.common import ASSETS, BenchmarkConfig, main
from draftsmith.scripts.bench.timing import TEXT, prompts, timed_rounds
from draftsmith.scripts.kinds import drafter_specs
from draftsmith.scripts.pair import load_pair
from draftsmith.train.kinds.drafter import Drafter
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import environment


@dataclass
class BenchFloorConfig(BenchmarkConfig):
    """Compiled decoding beside its matrix products alone."""

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
    """All matrix products of a model's linear layers, and nothing else.

    Args:
        model: any model.
    """

    sources = (__file__,)

    def __init__(self, model: PreTrainedModel):
        super().__init__(model, ())

    @property
    def title(self) -> str:
        """What is compiled, for whoever waits."""
        return f"the products of {type(self.model).__name__}"

    def axes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the axes of each input that vary."""
        return ([{0: "k"} for _ in inputs[0]],)

    def forward(self, rows: list[Tensor]) -> list[Tensor]:
        """Multiply rows, (K, width) of each width that layers have; return something of each product, (K, layers)."""
        by_width = {given.shape[1]: given for given in rows}
        layers: list[Any] = products(self.model)
        layers = layers or [layer for group in groups(self.model) for layer in group.layers]
        return [torch.cat([layer(by_width[layer.in_features])[:, :1] for layer in layers], 1)]


def product_seconds(model: PreTrainedModel, tokens: int, as_stored: bool = False, repeats: int = 50) -> float:
    """Return the seconds of all matrix products of a model's linear layers with a block of tokens.

    Args:
        model: any model.
        tokens: of the block.
        as_stored: by the library with the weights as the model has them, not as programs compute them.
        repeats: the median of so many.
    """
    layers = [layer.get_parameter("weight") for group in groups(model) for layer in group.layers]
    rows = {weight.shape[1]: torch.randn(tokens, weight.shape[1], dtype=weight.dtype) for weight in layers}

    def library() -> None:
        for weight in layers:
            torch.nn.functional.linear(rows[weight.shape[1]], weight)

    with torch.inference_mode():
        if as_stored:
            return median_seconds({"": library}, repeats)[""]
        inputs = [list(rows.values())]
        program = Programs.of(model).get(ProductsForward(model), inputs)
        return median_seconds({"": lambda: program(*inputs)}, repeats)[""]


def bench(config: BenchFloorConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures."""
    tokenizer = load_tokenizer(config.target, field="target")
    specs = drafter_specs(config.drafter, [config.draft_length])
    pair = load_pair(config.target, tokenizer, specs, config.dtype)
    pair.target.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id)
    blocks = sorted({1, 2, 4, 8, *(1 + drafter.draft_lengths[0] for drafter in pair.drafters)})
    of_blocks = {
        layout: {k: 1e3 * product_seconds(pair.target, k, layout == "as stored") for k in blocks}
        for layout in ("as stored", "as compiled")
    }
    ids = prompts(tokenizer.encode(TEXT), 1)
    floors = {"plain": 1e3 * product_seconds(pair.target, 1)} | {
        drafter.name: 1e3 * _floor(pair.target, drafter) for drafter in pair.drafters
    }
    rounds = {
        f"{name}, T = {temperature:g}": figures
        | {"products_ms": floors[name], "over_products": figures["round_ms"] / floors[name]}
        for temperature in config.temperature
        for name, figures in timed_rounds(
            pair.target, pair.drafters, ids, temperature, config.max_new_tokens, config.repeats
        ).items()
    }
    return {"environment": environment(torch.device("cpu"), config.dtype), "products_ms": of_blocks, "rounds": rounds}


def _floor(target: PreTrainedModel, drafter: Drafter) -> float:
    """Return the seconds of the products of a round; those of heads are left out."""
    length, model = drafter.draft_lengths[0], drafter.model
    drafting = 0.0 if model is None else length * product_seconds(model, 1)
    return product_seconds(target, 1 + drafter.proposer.nodes(length)) + drafting


if __name__ == "__main__":
    main(BenchFloorConfig, bench)
