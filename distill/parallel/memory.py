"""The memory plan of a parallel draft, whose rows hold masks in addition to texts."""

from functools import partial
from typing import Any

import numpy as np
import torch

from draftsmith.distill.config import DistillPlanConfig
from draftsmith.distill.memory import DraftPlan
from draftsmith.distill.parallel.chains import Chains, kept_shares, most_masks
from draftsmith.distill.parallel.trainer import ParallelTrainer
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.memory.setting import MemorySetting
from draftsmith.train.memory.training import TracedStep


class ParallelPlan(DraftPlan):
    """The plan of a draft with masks, and its target without."""

    trainer_class = ParallelTrainer

    def masks(self, learns: bool) -> int:
        """Return the masks of a row: the greatest number in training, one for each token in evaluation."""
        return most_masks(self.batch.length, self._shares()) if learns else self.batch.length

    def positions(self, rows: int, learns: bool = True) -> int:
        """Return the greatest number of entries that learn."""
        return super().positions(rows) + rows * self.masks(learns)

    def trainer(self, step: TracedStep, **parts: Any) -> DistillTrainer:
        """Return the run's trainer without data."""
        if self.config.attn_implementation == "flex_attention":  # which takes no mask of all pairs
            parts["hidden_of"] = lambda model, input_ids, **_: last_hidden(model, input_ids=input_ids)
        return super().trainer(step, mask_token=0, _weights_K=torch.ones(self.config.parallel), **parts)

    def inputs(self, step: TracedStep, rows: int) -> dict[str, Any]:
        """Return a batch with the chains of its texts."""
        masks, length, entries = self.masks(step.learns), self.batch.length, step.positions
        if entries is None:
            entries = rows * (length - 1 + masks)
        texts = entries * length // (length + masks)  # the positions that have these chains
        inputs = self.batch.labelled(rows, positions=texts)
        zeros = partial(torch.zeros, dtype=torch.long)
        packed = zeros(rows, length + masks) if self.batch.packed else None
        spans: Any = np.arange(entries) * texts // entries  # the loss reads these numbers
        chains = Chains(
            zeros(rows, masks), zeros(rows, masks), packed, zeros(entries), zeros(entries), spans, zeros(entries)
        )
        return inputs | {"chains": chains}

    def _shares(self) -> np.ndarray:
        config = self.config
        return kept_shares(config.parallel, config.parallel_retention, config.parallel_minimum)

    def drafter_operations(self, setting: MemorySetting) -> float | None:
        """Return the operations of a token and its masks; a mask costs as much as a token."""
        token = super().drafter_operations(setting)
        return None if token is None else token * (1.0 + float(self._shares().sum()))


def plan_of(config: DistillPlanConfig) -> DraftPlan:
    """Return the plan of a distillation run, with masks for a parallel draft."""
    return ParallelPlan(config) if config.parallel else DraftPlan(config)
