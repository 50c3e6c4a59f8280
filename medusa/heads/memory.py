"""The memory plan of a training run of Medusa heads."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.errors import at_most
from draftsmith.medusa.heads.model import MedusaConfig, MedusaHeads
from draftsmith.medusa.memory import Guesses, HeadsPlan, StatesOf
from draftsmith.train.job.flops import Work
from draftsmith.train.lora import add_lora
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.memory.moments import Moment
from draftsmith.train.memory.setting import MemorySetting
from draftsmith.train.memory.states import Weights


class MedusaPlan(HeadsPlan):
    """Medusa heads, and a target that may be trained with them (Medusa-2)."""

    def empty_target(self, dtype: str) -> PreTrainedModel:
        """Return the target on the meta device, with gradients for its trained weights."""
        target = super().empty_target(dtype).requires_grad_(self.config.backbone == "full")
        if self.config.backbone == "lora":
            with torch.device("meta"):
                add_lora(target, self.config.lora)
        return target

    def build(self, lm_heads: str) -> MedusaHeads:
        """Return the heads, with "own" language-model heads or a "shared" one."""
        config, head = self.config, head_of(self.target(self.setting.target_dtype))
        vocab_size, hidden_size = head.weight.shape
        at_most(vocab_size).check("draft_vocabulary", config.draft_vocabulary or vocab_size)
        shape = MedusaConfig(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            num_heads=config.num_heads,
            num_hidden_layers=config.num_layers,
            truncated_vocab_size=config.draft_vocabulary or vocab_size,
            medusa_fc_bias=config.bias,
            original_lm_head=lm_heads == "shared",
            lm_head_bias=head.bias is not None,
            hydra=config.hydra,
        )
        heads = MedusaHeads(shape)
        for lm_head in heads.all_lm_heads:
            lm_head.requires_grad_(config.train_lm_heads)
        return heads

    def ends(self, drafter: MedusaHeads) -> Sequence[nn.Module]:
        """Return the language-model heads: K of them, or one."""
        return drafter.all_lm_heads

    def weights(self, drafter: MedusaHeads) -> Weights:
        """Count the heads' numbers; FSDP gathers them part by part."""
        parts = (*drafter.all_lm_heads, *drafter.blocks)
        largest = max(sum(p.numel() for p in part.parameters()) for part in parts)
        return replace(super().weights(drafter), buffers=0, largest_unit=largest, tail=0)

    def vocabulary(self, heads: MedusaHeads) -> int:
        """Return the heads' vocabulary size."""
        return heads.config.truncated_vocab_size

    def target_held(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes that the target always takes; only those of a copy if all of it is trained."""
        if self.config.backbone != "full":
            return super().target_held(setting)
        size = Weights.of(self.target(setting.target_dtype)).all
        copy = "the target as it was: weights in float32, whole"
        return {copy: 4.0 * size * self.config.needs_original}

    def moments(self, setting: MemorySetting) -> list[Moment]:
        """Return the times at which memory may peak."""
        target = self.target(setting.target_dtype)
        positions, weight = setting.rows * (self.batch.length - 1), head_of(target).weight
        forward, backward = self.loss_bytes(setting, positions)
        # The target's states stay until the last head's backward.
        hidden = float(positions * weight.shape[1] * weight.element_size())
        parts = [Moment("the target's forward", self.target_forward(setting))]
        held: dict[str, float] = {}
        if self.joint:
            backbone = self.step_bytes(target, self.batch, setting.precision, setting.checkpointing)
            # In joint training the backbone's activations are held while the losses are computed.
            parts.append(Moment("the backbone's backward", {"backbone: activations": backbone.backward(setting.rows)}))
            held = {"backbone: activations": backbone.in_loss(setting.rows)}
        held["target: hidden states"] = hidden * (1 + self.joint)
        return [
            *parts,
            Moment("the losses", held | {"losses: states, logits of a chunk, gradients": forward}),
            Moment("the heads' backward", held | {"losses: gradients": backward}),
            self.optimizer_step(setting),
        ]

    def guesses(self, heads: MedusaHeads, target: PreTrainedModel, positions: int) -> Guesses:
        """Return all heads' guesses."""
        return states_of_heads(heads), heads.head, ()

    def work(self, setting: MemorySetting) -> Work:
        """Return the arithmetic of the heads."""
        return Work.of_maps(*self.drafter(setting).maps)

    def drafter_operations(self, setting: MemorySetting) -> float | None:
        """Return the operations for a token, with those of a backbone in training."""
        heads, context = super().drafter_operations(setting), self.batch.length / 2
        if heads is None or not self.joint:
            return heads
        target = Work.of(self.target(setting.target_dtype))
        if target is None:
            return None
        return heads + target.step(1, context, 1) + (target.forward(1, context, 1) if setting.checkpointing else 0.0)

    def notes(self) -> list[str]:
        """Return a line that describes the run."""
        config, lm_heads = self.config, self.setting.lm_heads
        return [f"{config.num_heads} heads, {lm_heads} language-model heads, backbone {config.backbone}"]

    def known_changes(self) -> list[tuple[str, str, Any]]:
        """Return changes that may help: also shared language-model heads, and only what the backbone allows."""
        fixed = {"frozen": ("checkpointing",), "lora": (), "full": ("target_dtype", "target")}[self.config.backbone]
        changes = [change for change in super().known_changes() if change[1] not in fixed]
        return changes + [("lm_heads shared", "lm_heads", "shared")] * (self.setting.lm_heads == "own")


def states_of_heads(heads: MedusaHeads) -> StatesOf:
    """Return a function from the target's states to the inputs of each language-model head."""

    def states_of(hidden: Tensor) -> list[Tensor]:
        states, size = hidden.to(heads.dtype), (len(hidden), heads.config.num_heads, hidden.shape[1])
        embeddings = states.new_zeros(()).expand(size) if heads.config.hydra else None
        return [heads.states(i, states, embeddings) for i in range(heads.config.num_heads)]

    return states_of
