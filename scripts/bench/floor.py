"""`python -m draftsmith.scripts.bench.floor`: compiled decoding beside its matrix products alone.

No decoder of a model is faster than its products. For plain decoding and for each drafter it reports a round's time,
what of it passes inside the compiled calls, and the products of its forwards. Median of several decoded texts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.decode import autoregressive_generate, speculative_generate
from draftsmith.decode.cache.program import Program
from draftsmith.decode.cache.weights import groups
from draftsmith.decode.clock import median_seconds
from draftsmith.decode.errors import at_least, require
from draftsmith.scripts.bench.common import ASSETS, BenchmarkConfig, main
from draftsmith.scripts.kinds import drafter_specs
from draftsmith.scripts.pair import load_pair
from draftsmith.train.kinds.drafter import Drafter
from draftsmith.train.models import load_tokenizer
from draftsmith.train.provenance import environment

TEXT = "def add(a, b):\n    return a + b\n\n\ndef mean(numbers):\n"
UNCOUNTED = 2
"""Rounds at a text's beginning that are left out: they read the prompt."""


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


def product_seconds(model: PreTrainedModel, tokens: int, as_stored: bool = False, repeats: int = 50) -> float:
    """Return the seconds of all matrix products of a model's linear layers with a block of tokens.

    Args:
        model: any model.
        tokens: of the block.
        as_stored: with the weights as the model has them, not as compiled forwards lay them out.
        repeats: the median of so many.
    """
    weights = [
        weight
        for group in groups(model)
        for weight in (
            [layer.get_parameter("weight") for layer in group.layers]
            if as_stored
            else [group.laid_out()[f"{group.path}.weight"]]
        )
    ]
    inputs = {weight.shape[1]: torch.randn(tokens, weight.shape[1], dtype=weight.dtype) for weight in weights}

    @torch.inference_mode()
    def products() -> None:
        for weight in weights:
            nn.functional.linear(inputs[weight.shape[1]], weight)

    return median_seconds({"": products}, repeats)[""]


@dataclass
class Stopwatch:
    """The rounds of decoded texts, in seconds."""

    rounds: list[float] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)
    """Of each round, inside the compiled calls."""
    _begun: float | None = None
    _inside: float = 0.0

    def lap(self) -> None:
        """A round begins."""
        now = perf_counter()
        if self._begun is not None:
            self.rounds.append(now - self._begun)
            self.inside.append(self._inside)
        self._begun, self._inside = now, 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the compiled calls in this block."""
        run = Program.__call__

        def call(program: Program, *inputs: Any) -> list[Tensor]:
            begin = perf_counter()
            outputs = run(program, *inputs)
            self._inside += perf_counter() - begin
            return outputs

        patched: Any = Program
        patched.__call__ = call
        try:
            yield
        finally:
            patched.__call__ = run

    def figures(self, floor: float) -> dict[str, float]:
        """Return milliseconds of the median round, and its floor's."""
        seconds, outside = median(self.rounds), median(a - b for a, b in zip(self.rounds, self.inside, strict=True))
        return {
            "round_ms": 1e3 * seconds,
            "outside_compiled_calls_ms": 1e3 * outside,
            "outside_share": outside / seconds,
            "products_ms": 1e3 * floor,
            "over_products": seconds / floor,
        }


def bench(config: BenchFloorConfig) -> dict[str, Any]:
    """Run the benchmark and return the figures."""
    tokenizer = load_tokenizer(config.target, field="target")
    specs = drafter_specs(config.drafter, [config.draft_length])
    pair = load_pair(config.target, tokenizer, specs, config.dtype)
    pair.target.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id)
    blocks = sorted({1, 2, 4, 8, *(1 + drafter.draft_lengths[0] for drafter in pair.drafters)})
    products = {
        layout: {k: 1e3 * product_seconds(pair.target, k, layout == "as stored") for k in blocks}
        for layout in ("as stored", "as compiled")
    }
    ids = torch.as_tensor([tokenizer.encode(TEXT)])
    rounds = {
        f"{name}, T = {temperature:g}": figures
        for temperature in config.temperature
        for name, figures in _at(config, temperature, pair.target, pair.drafters, ids).items()
    }
    return {"environment": environment(torch.device("cpu"), config.dtype), "products_ms": products, "rounds": rounds}


def _at(
    config: BenchFloorConfig, temperature: float, target: PreTrainedModel, drafters: list[Drafter], ids: Tensor
) -> dict[str, dict[str, float]]:
    """Return the figures of plain decoding and of each drafter at a temperature."""
    options: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "do_sample": False}
    if temperature:
        options |= {"do_sample": True, "temperature": temperature, "top_k": 0}

    def plain(lap: Callable[[], None]) -> None:
        autoregressive_generate(target, ids, compiled=True, observer=lambda *_: lap(), **options)

    def speculative(drafter: Drafter) -> Callable[[Callable[[], None]], None]:
        def decode(lap: Callable[[], None]) -> None:
            speculative_generate(
                target,
                drafter.proposer,
                ids,
                draft_length=drafter.draft_lengths[0],
                compiled=True,
                observer=lambda *_: lap(),
                **options,
            )

        return decode

    methods = {"plain": plain} | {drafter.name: speculative(drafter) for drafter in drafters}
    floors = {"plain": product_seconds(target, 1)}
    for drafter in drafters:
        length, model = drafter.draft_lengths[0], drafter.model
        drafting = 0.0 if model is None else length * product_seconds(model, 1)
        floors[drafter.name] = product_seconds(target, 1 + drafter.proposer.nodes(length)) + drafting
    watches = {name: Stopwatch() for name in methods}
    for repeat in range(1 + config.repeats):
        for name, method in methods.items():
            text = Stopwatch()
            with text.watching():
                method(text.lap)
            if repeat:
                watches[name].rounds += text.rounds[UNCOUNTED:]
                watches[name].inside += text.inside[UNCOUNTED:]
    return {name: watch.figures(floors[name]) for name, watch in watches.items()}


if __name__ == "__main__":
    main(BenchFloorConfig, bench)
