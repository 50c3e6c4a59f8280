"""The memory plan of a draft that learns to draft in parallel: masks stand beside its texts."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.distill.config import DistillPlanConfig
from draftsmith.distill.memory import DraftPlan
from draftsmith.distill.parallel.chains import most_masks
from draftsmith.distill.parallel.model import parallel_hidden
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.memory.activations import BatchShape
from draftsmith.train.memory.setting import MemorySetting


@dataclass(frozen=True)
class MaskedBatch(BatchShape):
    """The shape of rows with mask tokens behind their texts, which the target does not see."""

    masks: int = 0
    """Mask tokens of a row."""
    dense: bool = True
    """Attention takes what each entry sees as one number for each pair of entries."""

    @property
    def entries(self) -> int:
        """Tokens and masks of a row."""
        return self.length + self.masks

    def inputs(self, rows: int) -> dict[str, Tensor]:
        """Return a batch of rows, (B, T + M) each, of padded texts or packed ones."""
        ids = torch.zeros(rows, self.entries, dtype=torch.long)
        inputs = {name: torch.ones_like(ids) for name in ("position_ids", "anchors")}
        if self.packed:
            inputs["texts"] = torch.ones_like(ids)
        return {"input_ids": ids} | inputs

    def hidden(self, model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
        """Return what a model's decoder makes of a batch, (B, L, H)."""
        return parallel_hidden(model, **inputs) if self.dense else last_hidden(model, input_ids=inputs["input_ids"])


class ParallelPlan(DraftPlan):
    """A draft with masks, and its target, which does not see them."""

    @property
    def draft_batch(self) -> MaskedBatch:
        """The texts and the most masks that are kept of them."""
        return self._masked(most_masks(self.batch.length, self.config.kept_shares))

    @property
    def evaluated_batch(self) -> MaskedBatch:
        """The texts with a mask behind each token."""
        return self._masked(self.batch.length)

    def _masked(self, masks: int) -> MaskedBatch:
        dense = self.config.attn_implementation != "flex_attention"
        return MaskedBatch(self.batch.length, self.batch.rows, self.batch.packed, masks, dense)

    def drafter_operations(self, setting: MemorySetting) -> float | None:
        """Return the operations of a token and its masks: a mask sees as much as a token, and has logits."""
        each = super().drafter_operations(setting)
        return None if each is None else each * (1.0 + float(self.config.kept_shares.sum()))


def plan_of(config: DistillPlanConfig) -> DraftPlan:
    """Return the plan of a distillation run, with masks where the draft learns to draft in parallel."""
    return ParallelPlan(config) if config.parallel else DraftPlan(config)
