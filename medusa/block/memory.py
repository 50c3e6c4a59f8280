"""The memory plan of a training run of a block drafter: a forward of the target, and the blocks after some anchors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.kernels import computing_dtype
from draftsmith.medusa.block.blocks import anchors_at_once, anchors_of, states_of_blocks, work_of_blocks
from draftsmith.medusa.block.config import BlockPlanConfig
from draftsmith.medusa.block.initial import new_drafter
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.memory import FeaturePlan, Guesses, fake_target_states
from draftsmith.medusa.target_states import TargetStates
from draftsmith.train.job.flops import Work
from draftsmith.train.memory.activations import Forward, precision_of
from draftsmith.train.memory.setting import MemorySetting


class BlockPlan(FeaturePlan):
    """A block drafter on a frozen target."""

    part = "blocks"
    config: BlockPlanConfig

    def build(self, lm_heads: str) -> BlockDrafter:
        """Return the run's drafter."""
        config = self.config

        def new(target: PreTrainedModel, tokens: Tensor | None) -> BlockDrafter:
            return new_drafter(config, target, config.mask_token or 0, tokens)

        return self.made(config, BlockDrafter, new)  # type: ignore[no-any-return]

    def ends(self, drafter: BlockDrafter) -> Sequence[nn.Module]:
        """Return the head that adds logits."""
        return [head for head in (drafter.side_head,) if head is not None]

    @property
    def anchors(self) -> int:
        """The anchors of a row."""
        return anchors_of(self.config.anchors, self.batch.length)

    def positions(self, rows: int) -> int:
        """Return the number of guesses in the drawn blocks."""
        return rows * self.anchors * self.drafter(self.setting).config.guesses  # type: ignore[no-any-return]

    def forward(self, dtype: str) -> Forward:
        """Return a forward of the blocks that a step draws."""
        return self._blocks(dtype, self.anchors)

    def _blocks(self, dtype: str, anchors: int) -> Forward:
        target = self.target(dtype)

        def forward(drafter: BlockDrafter, inputs: dict[str, Tensor]) -> tuple[Sequence[Tensor], TargetStates]:
            ids, length = inputs["input_ids"], self.batch.length
            states = fake_target_states(target, len(drafter.layer_ids), len(ids), length)
            positions = torch.zeros(len(ids), anchors, dtype=torch.long)  # any anchors take the same memory
            position_ids = self.batch.inputs(len(ids)).get("position_ids")
            embed: Any = target.get_input_embeddings()
            return [states_of_blocks(drafter, embed, states, ids, position_ids, positions).flatten(0, 2)], states

        return forward

    def evaluated(self, setting: MemorySetting) -> float:
        """Return the bytes of an evaluation, which computes blocks in parts and keeps all of their outputs."""
        drafter, rows, length = self.drafter(setting), setting.rows, self.batch.length
        together = min(length, max(1, anchors_at_once(rows * length, drafter.config.block_size)))
        forward = self._blocks(setting.target_dtype, together)
        peak = self.forward_bytes(drafter, self.batch, setting.precision, forward)(rows)
        with self.mode, precision_of(setting.precision):
            size = computing_dtype(drafter.fc.weight).itemsize
        return peak + rows * length * drafter.config.guesses * drafter.config.hidden_size * size  # type: ignore[no-any-return]

    def guesses(self, heads: BlockDrafter, target: PreTrainedModel, positions: int) -> Guesses:
        """Return the blocks' guesses; all but side states are counted with the blocks."""
        shape, dtype = (positions, heads.config.hidden_size), computing_dtype(heads.fc.weight)
        hidden, before = torch.zeros(shape, dtype=dtype, requires_grad=True), torch.zeros(positions, dtype=torch.long)
        head = heads.head_for(target)
        given = hidden, before, head.weight

        def states_of(_: Tensor) -> list[Tensor]:
            if heads.side_head is None:
                return [hidden]
            return [heads.head_states(hidden[:, None], before[:, None])[:, 0]]

        return states_of, lambda _: heads.whole_head(head), given

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
