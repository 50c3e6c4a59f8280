"""The memory plan of a training run of a block drafter: a forward of the target, and the blocks after some anchors."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.medusa.block.blocks import anchors_of, work_of_blocks
from draftsmith.medusa.block.config import BlockPlanConfig
from draftsmith.medusa.block.initial import new_drafter, with_further_heads
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.block.trainer import BlockTrainer, GuessStats
from draftsmith.medusa.memory import FeaturePlan
from draftsmith.medusa.trainer import HeadsTrainer
from draftsmith.train.job.flops import Work
from draftsmith.train.memory.activations import BatchShape
from draftsmith.train.memory.setting import MemorySetting
from draftsmith.train.memory.training import TracedStep


class BlockPlan(FeaturePlan):
    """A block drafter on a frozen target."""

    part, trainer_class = "blocks", BlockTrainer
    config: BlockPlanConfig

    def build(self, lm_heads: str) -> BlockDrafter:
        """Return the run's drafter."""
        config = self.config

        def new(target: PreTrainedModel, tokens: Tensor | None) -> BlockDrafter:
            return new_drafter(config, target, config.mask_token or 0, tokens)

        drafter = self.made(config, BlockDrafter, new)
        return drafter if config.heads is None else with_further_heads(drafter, config)[0]  # type: ignore[no-any-return]

    def ends(self, drafter: BlockDrafter) -> Sequence[nn.Module]:
        """Return the head that adds logits."""
        return [head for head in (drafter.side_head,) if head is not None]

    @property
    def anchors(self) -> int:
        """The anchors of a row."""
        return anchors_of(self.config.anchors, self.batch.length)

    def positions(self, rows: int, learns: bool = True) -> int:
        """Return the number of guesses in the drawn blocks."""
        return rows * self.anchors * self.drafter(self.setting).config.guesses  # type: ignore[no-any-return]

    def trainer(self, step: TracedStep, **parts: Any) -> HeadsTrainer:
        """Return the run's trainer without data, with as many anchors as the positions take."""
        if step.positions is not None:
            parts["config"] = config = copy(self.config)
            config.anchors = self._anchors(step.positions)
        trainer: Any = super().trainer(step, **parts)
        _ = trainer.frozen_head
        trainer.state.max_steps = 1  # the first step: with `plain_until` it has both kinds of guesses
        # Statistics of the guesses are not counted: with top-k or top-p they read logits, which have no data.
        trainer._statistics = lambda blocks, *_: GuessStats(*torch.zeros(2, len(blocks.labels)))
        return trainer  # type: ignore[no-any-return]

    def shape(self, step: TracedStep) -> BatchShape:
        """Return the shape of a batch that has room for the anchors."""
        return replace(self.batch, length=max(self.batch.length, self._anchors(step.positions or 0)))

    def _anchors(self, positions: int) -> int:
        return -(-positions // self.drafter(self.setting).config.guesses)  # type: ignore[no-any-return]

    def work(self, setting: MemorySetting) -> Work:
        """Return the arithmetic of the blocks."""
        return work_of_blocks(self.drafter(setting), self.anchors / self.batch.length)

    def notes(self) -> list[str]:
        """Return a line that describes the drafter."""
        shape = self.drafter(self.setting).config
        layers = ", ".join(map(str, shape.target_layer_ids))
        return [
            f"{self.anchors} blocks of {shape.block_size} slots a row, {shape.num_hidden_layers} layers, which see the "
            f"target's layers {layers}, drafts among {shape.draft_vocab_size:,} of {shape.vocab_size:,} tokens"
        ]
