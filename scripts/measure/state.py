"""What one run of `measure` has seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftsmith.decode.measurement.certificate import Certificate
from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.measurement.replay import Replay
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.scripts.measure.reconcile.rounds import ExpectedText
from draftsmith.scripts.measure.side_by_side import Method, Observations
from draftsmith.scripts.report.types import Failure, TreePicture, Verifier
from draftsmith.scripts.settings import Settings
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.kinds.drafter import Drafter, Pair

PROBABILISTIC: Verifier = "probabilistic"
GREEDY: Verifier = "greedy"
"""Verifiers: of drafts that were drawn from q, and of the draft's argmax, which servers draft by default."""
Replays = Mapping[tuple[float, str, Verifier], Replay]
"""By temperature, drafter and verifier."""


@dataclass(frozen=True)
class Measured:
    """What one run of `measure` has seen."""

    config: MeasureConfig
    pair: Pair
    chosen: Settings
    prompts: Sequence[Prompt]
    """Those that were replayed; the first of them were decoded too."""
    prompt_ids: Sequence[list[int]]
    texts: Mapping[float, Sequence[list[int]]]
    """By temperature, the target's text of each prompt, unless one could not be written."""
    observations: Observations
    replays: Replays
    first_heads: Mapping[tuple[float, str], Replay]
    """Where a tree cannot be replayed, what its first token would be accepted at."""
    tables: Sequence[CostTable]
    lossless: Mapping[tuple[float, int, Method], Certificate]
    trees: Sequence[TreePicture]
    rounds: Sequence[ExpectedText] = ()
    """What every round of the texts accepts, for servers to be compared with."""
    failures: Sequence[Failure] = ()
    """What else should have been seen."""

    @property
    def settings(self) -> list[tuple[float, int]]:
        """The temperatures and batch sizes, in order."""
        return list(dict.fromkeys((t, b) for t, b, _ in self.observations))

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
