"""The memory plan of a training run of Medusa heads."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.errors import at_most
from draftsmith.medusa.heads.model import MedusaConfig, MedusaHeads
from draftsmith.medusa.heads.trainer import MedusaTrainer
from draftsmith.medusa.memory import HeadsPlan
from draftsmith.medusa.trainer import HeadsTrainer
from draftsmith.train.job.flops import Work
from draftsmith.train.lora import add_lora
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.memory.activations import Activations, text_loss, trace_step
from draftsmith.train.memory.layers import shallow
from draftsmith.train.memory.moments import Moment
from draftsmith.train.memory.setting import MemorySetting
from draftsmith.train.memory.states import Weights
from draftsmith.train.memory.training import TracedStep


class MedusaPlan(HeadsPlan):
    """Medusa heads, and a target that may be trained with them (Medusa-2)."""

    trainer_class = MedusaTrainer

    def __init__(self, config: Any):
        super().__init__(config)
        self._backbones = lru_cache(self._backbone)

    def empty_target(self, dtype: str) -> PreTrainedModel:
        """Return the target on the meta device, with gradients for its trained weights."""
        target = super().empty_target(dtype).requires_grad_(self.config.backbone == "full")
        if self.config.backbone == "lora":
            with torch.device("meta"):
                add_lora(target, self.config.lora)
        return target

    @property
    def sees_embeddings(self) -> bool:
        """Whether the heads see the target's embeddings: Hydra heads do."""
        return bool(self.config.hydra)

    def build(self, lm_heads: str) -> MedusaHeads:
        """Return the heads, with "own" language-model heads or a "shared" one."""
        config, target = self.config, self.target(self.setting.target_dtype)
        if config.heads is not None:
            earlier = MedusaHeads.without_weights(config.heads)
            earlier.check_fits(target)
            return earlier
        head = head_of(target)
        vocab_size, hidden_size = head.weight.shape
        at_most(vocab_size).check("draft_vocabulary", config.draft_vocabulary or vocab_size)
        shape = MedusaConfig(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            num_heads=config.num_heads,
            num_hidden_layers=config.num_layers,
            truncated_vocab_size=config.draft_vocabulary or vocab_size,
            original_lm_head=lm_heads == "shared",
            lm_head_bias=head.bias is not None,
            hydra=config.hydra,
        )
        return MedusaHeads(shape)

    def ends(self, drafter: MedusaHeads) -> Sequence[nn.Module]:
        """Return the language-model heads: K of them, or one."""
        return drafter.all_lm_heads

    def weights(self, drafter: MedusaHeads) -> Weights:
        """Count the heads' numbers; FSDP gathers them part by part."""
        parts = (*drafter.all_lm_heads, *drafter.blocks)
        largest = max(sum(p.numel() for p in part.parameters()) for part in parts)
        return replace(super().weights(drafter), largest_unit=largest, tail=0)

    def vocabulary(self, setting: MemorySetting) -> int:
        """Return the heads' vocabulary size."""
        return int(self.drafter(setting).config.truncated_vocab_size)

    def target_held(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes that the target always takes; only those of a copy if all of it is trained."""
        if self.config.backbone != "full":
            return super().target_held(setting)
        size = Weights.of(self.target(setting.target_dtype)).all
        copy = "the target as it was: weights in float32, whole"
        return {copy: 4.0 * size}

    def count(self, heads: MedusaHeads) -> int:
        """Return the number of heads."""
        return heads.config.num_heads

    def trainer(self, step: TracedStep, **parts: Any) -> HeadsTrainer:
        """Return the trainer of the heads alone: a backbone's activations are counted separately."""
        config = copy(self.config)
        config.backbone = "frozen"
        return super().trainer(step, config=config, **parts)

    def loss(self, step: TracedStep, rows: int, **seams: Any) -> Tensor:
        """Return the trainer's loss; the target's layers are counted separately."""
        with shallow(self.target(step.setting.target_dtype)):
            return super().loss(step, rows, **seams)

    def _backbone(self, setting: MemorySetting) -> Activations:
        target = self.target(setting.target_dtype)
        loss = text_loss(target, self.batch, setting.precision)
        return trace_step(self.mode, target, self.batch, loss, setting.checkpointing)

    def backbone(self, setting: MemorySetting) -> dict[str, float]:
        """Return the activations of a backbone in training."""
        return {"backbone: activations": self._backbones(setting.traced).in_loss(setting.rows)} if self.joint else {}

    def moments(self, setting: MemorySetting) -> list[Moment]:
        """Return the times at which memory may peak; in joint training the backbone's backward too."""
        moments = super().moments(setting)
        if self.joint:
            size = self._backbones(setting.traced).backward(setting.rows)
            moments.insert(1, Moment("the backbone's backward", {"backbone: activations": size}))
        return moments

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
        heads, lm_heads = self.drafter(self.setting).config.num_heads, self.setting.lm_heads
        return [f"{heads} heads, {lm_heads} language-model heads, backbone {self.config.backbone}"]

    def known_changes(self) -> list[tuple[str, str, Any]]:
        """Return changes that may help: also shared language-model heads, and only what the backbone allows."""
        fixed = {"frozen": ("checkpointing",), "lora": (), "full": ("target_dtype", "target")}[self.config.backbone]
        changes = [change for change in super().known_changes() if change[1] not in fixed]
        return changes + [("lm_heads shared", "lm_heads", "shared")] * (self.setting.lm_heads == "own")
