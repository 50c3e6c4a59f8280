"""The memory plan of a parallel draft, whose rows hold masks in addition to texts."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.distill.config import DistillPlanConfig
from draftsmith.distill.memory import DraftPlan
from draftsmith.distill.parallel.chains import kept_shares, most_masks
from draftsmith.distill.parallel.model import parallel_hidden
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.memory.activations import BatchShape
from draftsmith.train.memory.setting import MemorySetting


@dataclass(frozen=True)
class MaskedBatch(BatchShape):
    """The shape of rows with mask tokens after their texts, which the target does not see."""

    masks: int = 0  # the number of mask tokens in a row
    dense: bool = True  # whether attention takes a mask with an entry for each query and key

    @property
    def entries(self) -> int:
        """The number of tokens and masks in a row."""
        return self.length + self.masks

    def inputs(self, rows: int) -> dict[str, Tensor]:
        """Return a batch, (B, T + M), of padded or packed texts."""
        ids = torch.zeros(rows, self.entries, dtype=torch.long)
        inputs = {name: torch.ones_like(ids) for name in ("position_ids", "anchors")}
        if self.packed:
            inputs["texts"] = torch.ones_like(ids)
        return {"input_ids": ids} | inputs

    def hidden(self, model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
        """Return the last hidden states of a batch, (B, L, H)."""
        return parallel_hidden(model, **inputs) if self.dense else last_hidden(model, input_ids=inputs["input_ids"])


class ParallelPlan(DraftPlan):
    """The plan of a draft with masks, and its target without."""

    @property
    def draft_batch(self) -> MaskedBatch:
        """The texts with their greatest number of masks."""
        return self._masked(most_masks(self.batch.length, self._shares()))

    @property
    def evaluated_batch(self) -> MaskedBatch:
        """The texts with a mask for each token."""
        return self._masked(self.batch.length)

    def _shares(self) -> np.ndarray:
        config = self.config
        return kept_shares(config.parallel, config.parallel_retention, config.parallel_minimum)

    def _masked(self, masks: int) -> MaskedBatch:
        dense = self.config.attn_implementation != "flex_attention"
        return MaskedBatch(self.batch.length, self.batch.rows, self.batch.packed, masks, dense)

    def drafter_operations(self, setting: MemorySetting) -> float | None:
        """Return the operations of a token and its masks; a mask costs as much as a token."""
        token = super().drafter_operations(setting)
        return None if token is None else token * (1.0 + float(self._shares().sum()))


def plan_of(config: DistillPlanConfig) -> DraftPlan:
    """Return the plan of a distillation run, with masks for a parallel draft."""
    return ParallelPlan(config) if config.parallel else DraftPlan(config)
