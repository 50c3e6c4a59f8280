"""The memory plan of a training run of a block drafter: a forward of the target, and the blocks after some anchors."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.medusa.block.blocks import anchors_of, work_of_blocks
from draftsmith.medusa.block.initial import new_drafter, with_further_heads
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.block.trainer import BlockTrainer, GuessStats
from draftsmith.medusa.memory import FeaturePlan


class BlockPlan(FeaturePlan):
    """A block drafter on a frozen target."""

    trainer_class = BlockTrainer

    def build(self) -> BlockDrafter:
        """Return the run's drafter."""
        config = self.config

        def new(target: PreTrainedModel, tokens: Tensor | None) -> BlockDrafter:
            return new_drafter(config, target, config.mask_token or 0, tokens)

        drafter = self.made(BlockDrafter, new)
        return drafter if config.heads is None else with_further_heads(drafter, config)[0]  # type: ignore[no-any-return]

    def make_trainer(self) -> Any:
        """Return the run's trainer without data."""
        trainer, length = super().make_trainer(), self.batch.length
        # Statistics of the guesses are not counted: with top-k or top-p they read logits, which have no data.
        trainer._statistics = lambda blocks, *_: GuessStats(*torch.zeros(2, len(blocks.labels)))
        share = anchors_of(self.config.anchors, length) / length
        trainer.trained_work = lambda: work_of_blocks(self.drafter, share)
        return trainer
