"""Observations of one run of `measure`."""

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
from draftsmith.scripts.measure.reconcile.rounds import ExpectedText
from draftsmith.scripts.report.types import Failure, TreePicture, Verifier
from draftsmith.scripts.settings import Settings
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.kinds.drafter import Drafter, Pair
from draftsmith.train.models import default_device

PROBABILISTIC: Verifier = "probabilistic"
GREEDY: Verifier = "greedy"
"""Verifiers: of drafts that were drawn from q, and of the draft's argmax, which servers draft by default."""
Replays = Mapping[tuple[float, str, Verifier], Replay]
"""By temperature, drafter and verifier."""
PLAIN = ""
"""The name of plain decoding among the drafters'."""


@dataclass(frozen=True)
class Method:
    """One way of decoding: plain, or a drafter at one draft length."""

    drafter: str = PLAIN
    draft_length: int = 0

    def at(self, temperature: float, batch_size: int | None = None) -> str:
        """Name it in a setting, in words."""
        name = "plain decoding" if self.drafter == PLAIN else f"{self.drafter}, γ = {self.draft_length}"
        return f"{name}, at T = {temperature:g}" + ("" if batch_size is None else f", batch size {batch_size}")


@dataclass(frozen=True)
class Row:
    """One prompt's completion."""

    prompt: Count
    """Its place among the prompts."""
    tokens: list[TokenId]
    counts: Annotated[Counts, AfterValidator(possible)]
    sources: list[Counts] = field(default_factory=list)
    """Where drafters take turns, by drafter: see `DecodeOutput.row_sources`."""


@dataclass(frozen=True)
class Group:
    """Prompts that were decoded together."""

    rows: list[Row]
    seconds: Annotated[Amount, Field(gt=0)]
    """Median over the repeats."""

    @property
    def tokens(self) -> int:
        """All that was written."""
        return sum(len(row.tokens) for row in self.rows)


Observations = Mapping[tuple[float, int, Method], Sequence[Group]]
"""By temperature, batch size and method, in the order of the prompts."""


def member_name(drafter: Drafter, source: str) -> str:
    """Return what tables of costs call one of several that take turns."""
    return f"{drafter.name}/{source}"


@dataclass
class Measured:
    """One run of `measure`: what is given, and what has been seen so far."""

    config: MeasureConfig
    pair: Pair
    chosen: Settings
    prompts: Sequence[Prompt]
    """Those that are replayed; the first of them are decoded too."""
    prompt_ids: Sequence[list[int]]
    texts: dict[float, list[list[int]]] = field(default_factory=dict)
    """By temperature, the target's text of each prompt, unless one could not be written."""
    observations: dict[tuple[float, int, Method], Sequence[Group]] = field(default_factory=dict)
    replays: dict[tuple[float, str, Verifier], Replay] = field(default_factory=dict)
    first_heads: dict[tuple[float, str], Replay] = field(default_factory=dict)
    """Where a tree cannot be replayed, what its first token would be accepted at."""
    tables: Sequence[CostTable] = ()
    lossless: dict[tuple[float, int, Method], Certificate] = field(default_factory=dict)
    trees: Sequence[TreePicture] = ()
    rounds: list[ExpectedText] = field(default_factory=list)
    """What every round of the texts accepts, for servers to be compared with."""
    failures: Sequence[Failure] = ()
    """Stages that failed."""

    @property
    def settings(self) -> list[tuple[float, int]]:
        """The temperatures and batch sizes that were decoded, in order."""
        return list(dict.fromkeys((t, b) for t, b, _ in self.observations))

    @property
    def methods(self) -> list[Method]:
        """What is decoded by: plainly first, then every drafter at each of its draft lengths."""
        return [Method(), *(Method(d.name, k) for d in self.pair.drafters for k in d.draft_lengths)]

    @property
    def decoded_ids(self) -> Sequence[list[int]]:
        """The prompts that are decoded by every method."""
        return self.prompt_ids[: self.config.limit]

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(ids) for ids in self.prompt_ids]

    def sampler(self, temperature: float) -> Sampler:
        """Return how tokens are drawn at a temperature."""
        return self.config.at(temperature).sampler()

    def sequences(self, temperature: float) -> list[Tensor]:
        """Return prompts with the target's texts at a temperature, (T,) each."""
        texts = zip(self.prompt_ids, self.texts[temperature], strict=True)
        return [torch.tensor(ids + text, device=default_device()) for ids, text in texts]

    def drafter(self, name: str) -> Drafter:
        """Return the drafter of a name."""
        return next(drafter for drafter in self.pair.drafters if drafter.name == name)

    def categories(self) -> dict[str, list[int]]:
        """Return the places of each category's prompts, in order of the names."""
        categories: dict[str, list[int]] = {}
        for place, prompt in enumerate(self.prompts):
            if prompt.category is not None:
                categories.setdefault(prompt.category, []).append(place)
        return dict(sorted(categories.items()))

    def costs(self, temperature: float) -> CostTable | None:
        """Return what rounds cost at a temperature, behind the texts' mean length; None where it was not measured."""
        texts = self.texts.get(temperature)
        if texts is None:
            return None
        mean = sum(len(ids) + len(text) / 2 for ids, text in zip(self.prompt_ids, texts, strict=True)) / len(texts)
        tables = [table for table in self.tables if table.temperature == temperature]
        return min(tables, key=lambda table: abs(table.context - mean), default=None)
