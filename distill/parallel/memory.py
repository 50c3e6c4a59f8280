"""The memory plan of a parallel draft, whose rows hold masks in addition to texts."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from draftsmith.distill.memory import DraftPlan
from draftsmith.distill.parallel.chains import Chains, kept_shares, most_masks
from draftsmith.distill.parallel.trainer import ParallelTrainer
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.memory.trace import BatchShape


class ParallelPlan(DraftPlan):
    """The plan of a draft with masks, and its target without."""

    trainer_class = ParallelTrainer

    def parts(self) -> dict[str, Any]:
        """Return the attributes of the kind's trainer that its loss reads."""
        parts = {"mask_token": 0, "_mask_work": np.zeros(3)}
        if self.config.attn_implementation == "flex_attention":  # which takes no mask of all pairs
            parts["hidden_of"] = lambda model, input_ids, **_: last_hidden(model, input_ids=input_ids)
        return parts

    def masks(self, learns: bool = True) -> int:
        """Return the masks of a row: the greatest number in training, one for each token in evaluation."""
        return most_masks(self.batch.length, self.shares) if learns else self.batch.length

    def inputs(self, batch: BatchShape, learns: bool = True) -> dict[str, Any]:
        """Return a batch with the chains of its texts."""
        masks, length, rows = self.masks(learns), batch.length, batch.rows
        entries = rows * (length - 1 + masks)
        texts = entries * length // (length + masks)  # the positions that have these chains
        zeros = partial(torch.zeros, dtype=torch.long)
        packed = zeros(rows, length + masks) if batch.packed else None
        spans: Any = np.arange(entries) * texts // entries  # the loss reads these numbers
        chains = Chains(
            zeros(rows, masks), zeros(rows, masks), packed, zeros(entries), zeros(entries), spans, zeros(entries)
        )
        return super().inputs(batch) | {"positions": [zeros(texts)], "chains": chains}

    def evaluated(self, inputs: dict[str, Any], model: nn.Module) -> Any:
        """Run the loss of an evaluation, which takes as much as its replay."""
        return self.trainer.summed_loss(model, inputs)

    @property
    def shares(self) -> np.ndarray:
        """The shares of anchors that keep each mask."""
        config = self.config
        return kept_shares(config.parallel, config.parallel_retention, config.parallel_minimum)

    @property
    def repeats(self) -> float:
        """The entries of the draft's forward for each token: a mask costs as much as a token."""
        return 1.0 + float(self.shares.sum())
