"""The batches of a draft that learns to draft in parallel, for the memory plan: masks stand beside the texts."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.distill.parallel.model import parallel_hidden
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.memory.activations import BatchShape


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
