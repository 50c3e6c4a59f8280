"""`accelerate launch -m draftsmith.medusa.block --config configs/block/tiny.yaml`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.medusa.block.blocks import anchors_of, work_of_blocks
from draftsmith.medusa.block.config import BlockTrainingConfig
from draftsmith.medusa.block.heads import family, side_heads
from draftsmith.medusa.block.initial import choose_init, mask_token, new_drafter, with_further_heads
from draftsmith.medusa.block.look_back import TEXTS, TOKENS, begin_looking_back
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.block.trainer import BlockTrainer, GuessStats
from draftsmith.medusa.memory import FeaturePlan
from draftsmith.medusa.run import HeadsRun
from draftsmith.train.data.first_look import few_texts, print_once
from draftsmith.train.job.ranks import leave, run_rank
from draftsmith.train.launch import launch
from draftsmith.train.losses.output_head import head_of

CARD = Path(__file__).with_name("card.md.j2")


class BlockRun(HeadsRun[BlockTrainingConfig]):
    """A run that trains a block drafter."""

    heads_class, trainer_class = BlockDrafter, BlockTrainer

    def new_heads(self) -> BlockDrafter:
        """Return a new drafter: the target's last layers, or random ones."""
        config, target = self.config, self.target
        rows = len(head_of(target).weight)
        mask = mask_token(self.tokenizer, rows) if config.mask_token is None else config.mask_token
        return new_drafter(config, target, mask, self.token_map)

    def earlier_heads(self) -> BlockDrafter:
        """Return the drafter of an earlier run, with the heads that this one adds."""
        earlier = super().earlier_heads()
        drafter, titles = with_further_heads(earlier, self.config)
        further = f", and a new {' and '.join(titles)}" if titles else ""
        print_once(f"init: {len(earlier.state_dict())} tensors of {self.config.heads}{further}")
        return drafter

    def check_heads(self) -> None:
        """Require a cache's features; freeze a confidence head whose loss is not wanted."""
        super().check_heads()
        head = self.heads.confidence_head
        if head is not None and not self.config.confidence:
            head.requires_grad_(False)  # DDP and weight decay must not touch a head without a loss

    def first_look(self) -> None:
        """Print how the drafter begins, and fit the first layer's look back if it has one."""
        shape, (start, clause) = self.heads.config, choose_init(self.config, self.heads, self.target)
        layers = "1 layer" if shape.num_hidden_layers == 1 else f"{shape.num_hidden_layers} layers"
        print_once(
            f"init: {layers} {clause}, on the outputs of the target's layers "
            f"{', '.join(map(str, shape.target_layer_ids))}; token {shape.mask_token_id} stands for a mask"
        )
        if start == "look_back":
            texts = few_texts(self.data, TEXTS, TOKENS)
            begin_looking_back(self.heads, self.target, self.states_of, texts, self.tokens)

    def finish(self, trainer: Any, output: Path) -> None:
        """Write the card."""
        config = trainer.heads.config
        name = family(config)
        self.write_card(trainer, output, CARD, name.lower(), name=name, side_heads=side_heads(config))


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


def train_block(config: BlockTrainingConfig) -> BlockTrainer:
    """Train as the config says; the drafter is in `config.training.output_dir` when this returns."""
    return BlockRun(config).train()  # type: ignore[return-value]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the config and train."""
    launch(BlockTrainingConfig, train_block, argv, prog="draftsmith.medusa.block")


if __name__ == "__main__":
    leave(run_rank(main))
