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
from draftsmith.medusa.memory import FeaturePlan, fake_target_states, trace_losses
from draftsmith.medusa.target_states import TargetStates
from draftsmith.train.job.flops import Work
from draftsmith.train.losses.output_head import OutputHead
from draftsmith.train.memory.activations import Forward, precision_of
from draftsmith.train.memory.setting import MemorySetting, Precision


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

    def vocabulary(self, heads: BlockDrafter) -> int:
        """Return the drafter's vocabulary size."""
        return heads.config.draft_vocab_size

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

    def traced_losses(
        self, heads: BlockDrafter, target: PreTrainedModel, precision: Precision, positions: int
    ) -> tuple[float, float]:
        """Return `trace_losses` without the states, which are counted with the blocks."""
        with self.mode, precision_of(precision):
            dtype = computing_dtype(heads.fc.weight)
            # Side states are made here, so they are counted with the losses.
            hidden = torch.zeros(positions, heads.config.hidden_size, dtype=dtype)
            before = torch.zeros(positions, dtype=torch.long)
            head = heads.head_for(target)
        hidden.requires_grad_(True)

        def states_of(_: Tensor) -> list[Tensor]:
            return [heads.head_states(hidden[:, None], before[:, None])[:, 0]]

        def head_of(_: int) -> OutputHead:
            return heads.whole_head(head)

        args = heads, target, self.config.objective, states_of, head_of, positions
        return trace_losses(self.mode, *args, precision, self.sizes, given=[hidden, before, head.weight])

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

    def known_changes(self) -> list[tuple[str, str, Any]]:
        """Return changes that may help; a quantised layer cannot be copied."""
        config, changes = self.config, super().known_changes()
        if config.heads is None and config.init in ("last_layers", "look_back"):
            begin = {"8bit": ", init random", "4bit": ", init random"}
            changes = [(name + begin.get(value, ""), field, value) for name, field, value in changes]
        return changes
