"""The observations of one run of `measure`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from draftsmith.decode import Counts
from draftsmith.decode.counts import possible
from draftsmith.decode.measurement.certificate import Certificate
from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.measurement.replay import Replay
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.validation import Amount, Count, TokenId
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.scripts.report.entries import Forecast
from draftsmith.scripts.report.rounds import ExpectedText
from draftsmith.scripts.report.types import Failure, Verifier
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.kinds.drafter import Drafter, Pair
from draftsmith.train.models import default_device

PROBABILISTIC: Verifier = "probabilistic"
GREEDY: Verifier = "greedy"
"""Verifiers of drafts that were drawn from q, and of the draft's argmax, which servers draft by default."""
Replays = Mapping[tuple[float, str, Verifier], Replay]
REPEATS = 2
"""Times each method decodes each prompt, in turns; up to twice as many where its ratios to plain decoding differ."""
PLAIN = ""
"""The name of plain decoding among those of drafters."""


@dataclass(frozen=True)
class Method:
    """One way of decoding: plain, or a drafter at one draft length."""

    drafter: str = PLAIN
    draft_length: int = 0

    def at(self, temperature: float, batch_size: int | None = None) -> str:
        """Return the method and its setting in words."""
        name = "plain decoding" if self.drafter == PLAIN else f"{self.drafter}, γ = {self.draft_length}"
        return f"{name}, at T = {temperature:g}" + ("" if batch_size is None else f", batch size {batch_size}")


@dataclass(frozen=True)
class Row:
    """One prompt's completion; `prompt` is its index among the prompts.

    `sources` holds counts by drafter if several take turns (`DecodeOutput.row_sources`).
    """

    prompt: Count
    tokens: list[TokenId]
    counts: Annotated[Counts, AfterValidator(possible)]
    sources: list[Counts] = field(default_factory=list)


@dataclass(frozen=True)
class Group:
    """Prompts that were decoded together, and their seconds."""

    rows: list[Row]
    seconds: Annotated[Amount, Field(gt=0)]

    @property
    def tokens(self) -> int:
        """The tokens of all rows."""
        return sum(len(row.tokens) for row in self.rows)


def member_name(drafter: Drafter, source: str) -> str:
    """Return the name that cost tables have for one member of a drafter whose members take turns."""
    return f"{drafter.name}/{source}"


def categories_of(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Return the indices of each category's prompts, sorted by category."""
    categories: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        if prompt.category is not None:
            categories.setdefault(prompt.category, []).append(index)
    return dict(sorted(categories.items()))


@dataclass
class Measured:
    """One run of `measure`: its input, and the results so far."""

    config: MeasureConfig
    pair: Pair
    prompts: Sequence[Prompt]
    """The replayed prompts; the first of them are decoded too."""
    prompt_ids: Sequence[list[int]]
    texts: dict[float, list[list[int]]] = field(default_factory=dict)
    """The target's text of each prompt, by temperature; absent if one could not be written."""
    observations: dict[tuple[float, int, Method], Sequence[Group]] = field(default_factory=dict)
    replays: dict[tuple[float, str, Verifier], Replay] = field(default_factory=dict)
    tables: Sequence[CostTable] = ()
    forecasts: Sequence[Forecast] = ()
    lossless: dict[tuple[float, int, Method], Certificate] = field(default_factory=dict)
    rounds: list[ExpectedText] = field(default_factory=list)
    failures: Sequence[Failure] = ()
    compared: list[tuple[int, Sequence[float]]] = field(default_factory=list)
    """The turns of each batch under each drafter, and the ratios to plain decoding of those undisturbed."""

    @property
    def settings(self) -> list[tuple[float, int]]:
        """The temperatures and batch sizes that were decoded, in order."""
        return list(dict.fromkeys((t, b) for t, b, _ in self.observations))

    @property
    def methods(self) -> list[Method]:
        """Plain decoding first, then every drafter at each of its draft lengths."""
        return [Method(), *(Method(d.name, k) for d in self.pair.drafters for k in d.draft_lengths)]

    @property
    def decoded_prompts(self) -> list[Tensor]:
        """The prompts that every method decodes, (T,) int64 each."""
        return [torch.tensor(ids, device=default_device()) for ids in self.prompt_ids[: self.config.limit]]

    @property
    def prompt_lengths(self) -> list[int]:
        """The tokens of each prompt."""
        return [len(ids) for ids in self.prompt_ids]

    def sampler(self, temperature: float) -> Sampler:
        """Return the sampler of a temperature."""
        return self.config.at(temperature).sampler()

    def sequences(self, temperature: float) -> list[Tensor]:
        """Return prompts with the target's texts at a temperature, (T,) each."""
        texts = zip(self.prompt_ids, self.texts[temperature], strict=True)
        return [torch.tensor(ids + text, device=default_device()) for ids, text in texts]

    def drafter(self, name: str) -> Drafter:
        """Return the drafter of this name."""
        return next(drafter for drafter in self.pair.drafters if drafter.name == name)

    def categories(self) -> dict[str, list[int]]:
        """Return the indices of each category's prompts, sorted by category."""
        return categories_of(self.prompts)

    def costs(self, temperature: float) -> CostTable | None:
        """Return the costs at a temperature; None if not measured."""
        return next((table for table in self.tables if table.temperature == temperature), None)
