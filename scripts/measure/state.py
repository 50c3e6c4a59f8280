"""What one run of `measure` has seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.measurement.replay import Replay
from draftsmith.scripts.measure.cost_file import table_for
from draftsmith.scripts.measure.side_by_side import Method, Observations
from draftsmith.scripts.pair import Drafter
from draftsmith.train.data.prompts import Prompt

PROBABILISTIC, GREEDY = "probabilistic", "greedy"
"""Verifiers: of drafts that were drawn from q, and of the draft's argmax, which servers draft by default."""
Replays = Mapping[tuple[float, str, str], Replay]
"""By temperature, drafter and verifier."""


@dataclass(frozen=True)
class Measured:
    """What one run of `measure` has seen."""

    target: PreTrainedModel
    target_path: str
    dtype: str
    tokenizer: PreTrainedTokenizerBase
    prompts_path: str
    prompts: Sequence[Prompt]
    """Those that were replayed; the first of them were decoded too."""
    prompt_ids: Sequence[list[int]]
    texts: Mapping[float, Sequence[list[int]]]
    """By temperature, the target's text of each prompt."""
    drafters: Sequence[Drafter]
    observations: Observations
    replays: Replays
    first_heads: Mapping[tuple[float, str], Replay]
    """Where a tree cannot be replayed, what its first head would be accepted at."""
    tables: Sequence[CostTable]
    lossless: Mapping[tuple[float, int, Method], dict[str, Any]]
    trees: Sequence[dict[str, str]]
    """Pictures."""

    @property
    def settings(self) -> list[tuple[float, int]]:
        """The temperatures and batch sizes, in order."""
        return list(dict.fromkeys((t, b) for t, b, _ in self.observations))

    def drafter(self, name: str) -> Drafter:
        """Return the drafter of a name."""
        return next(drafter for drafter in self.drafters if drafter.name == name)

    def categories(self) -> dict[str, list[int]]:
        """Return the places of each category's prompts, in order of the names."""
        found: dict[str, list[int]] = {}
        for place, prompt in enumerate(self.prompts):
            if prompt.category is not None:
                found.setdefault(prompt.category, []).append(place)
        return dict(sorted(found.items()))

    def costs(self, temperature: float) -> CostTable | None:
        """Return what rounds cost at a temperature, behind the texts' mean length; None where it was not measured."""
        own = self.texts[temperature]
        mean = sum(len(ids) + len(text) / 2 for ids, text in zip(self.prompt_ids, own, strict=True)) / len(own)
        return table_for(self.tables, temperature, mean) if self.tables else None
