"""What training Medusa heads holds in GPU memory: heads of the shape that a config says, on a target without data."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.errors import at_most
from draftsmith.medusa.heads.model import MedusaConfig, MedusaHeads
from draftsmith.train.job.flops import Work
from draftsmith.train.lora import add_lora
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.memory.activations import shadow
from draftsmith.train.memory.heads import HeadsPlan, StatesOf, trace_losses
from draftsmith.train.memory.moments import Moment
from draftsmith.train.memory.setting import MemorySetting
from draftsmith.train.memory.states import Weights


class MedusaPlan(HeadsPlan):
    """Medusa heads, with a target that is trained too where the config says so (Medusa-2)."""

    def prepared(self, target: PreTrainedModel) -> PreTrainedModel:
        """Return the target with gradients where it trains."""
        target.requires_grad_(self.config.backbone == "full")
        if self.config.backbone == "lora":
            with torch.device("meta"):
                add_lora(target, self.config.lora)
        return target

    def _heads(self, lm_heads: str, half: bool) -> MedusaHeads:
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
        with torch.device("meta"):
            heads = MedusaHeads(shape)
        for lm_head in heads.all_lm_heads:
            lm_head.requires_grad_(config.train_lm_heads)
        shadow(self.mode, heads, half)
        return heads

    def lm_heads(self, heads: MedusaHeads) -> Sequence[nn.Module]:
        """Return the language-model heads: K of them, or one."""
        return heads.all_lm_heads

    def weights(self, heads: MedusaHeads) -> Weights:
        """Count the heads' numbers."""
        whole = sum(p.numel() for p in heads.parameters())
        largest = max(sum(p.numel() for p in part.parameters()) for part in (*heads.all_lm_heads, *heads.blocks))
        return Weights(whole, whole, 0, largest, 0, heads.config.hidden_size**2)

    def vocabulary(self, heads: MedusaHeads) -> int:
        """Return the tokens that the heads draft among."""
        return heads.config.truncated_vocab_size

    def target_held(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes that the target takes at all times: as it was, where all of it is trained."""
        if self.config.backbone != "full":
            return super().target_held(setting)
        size = Weights.of(self.target(setting.target_dtype)).all
        copy = "the target as it was: weights in float32, whole"
        return {copy: 4.0 * size * self.config.needs_original}

    def moments(self, setting: MemorySetting) -> list[Moment]:
        """Return the times at which memory may be at its most."""
        target = self.target(setting.target_dtype)
        positions, weight = setting.rows * (self.batch.length - 1), head_of(target).weight
        forward, backward = self.loss_bytes(setting, positions)
        hidden = float(positions * weight.shape[1] * weight.element_size())
        parts = [Moment("the target's forward", self.frozen_forward(setting))]
        held: dict[str, float] = {}
        if self.joint:
            kept = self._activations(target, self.batch, setting.precision, setting.checkpointing)
            parts.append(Moment("the backbone's backward", {"backbone: activations": kept.backward(setting.rows)}))
            held = {"backbone: activations": kept.in_loss(setting.rows)}
        held["target: hidden states"] = hidden * (1 + self.joint)
        return [
            *parts,
            Moment("the losses", held | {"losses: states, logits of a chunk, gradients": forward}),
            Moment("the heads' backward", held | {"losses: gradients": backward}),
            self.optimizer_step(setting),
        ]

    def traced_losses(self, setting: MemorySetting, positions: int) -> tuple[float, float]:
        """Return `trace_losses` at so many positions."""
        heads, target = self.made(setting), self.target(setting.target_dtype)
        args = heads, target, self.config.objective, states_of_heads(heads), heads.head, positions
        return trace_losses(self.mode, *args, setting.precision, self.sizes)

    def work(self, setting: MemorySetting) -> Work:
        """Return the arithmetic of the heads."""
        return Work.of_maps(*self.heads(setting.lm_heads, False).maps)

    def note(self, setting: MemorySetting) -> str:
        """Say what is trained."""
        config = self.config
        return f"{config.num_heads} heads, {setting.lm_heads} language-model heads, backbone {config.backbone}"

    def own_changes(self) -> list[tuple[str, dict[str, Any]]]:
        """Return what may be changed of these heads."""
        now, full = self.setting, self.config.backbone == "full"
        known: list[tuple[str, dict[str, Any]]] = []
        if self.joint and not now.checkpointing:
            known.append(("training.activation_checkpointing true", {"checkpointing": True}))
        if now.target_dtype in ("float32", "float64") and not full:
            known.append(("target_dtype bfloat16", {"target_dtype": "bfloat16"}))
        if now.lm_heads == "own":
            known.append(("lm_heads shared", {"lm_heads": "shared"}))
        if now.target == "whole" and not full:
            known += [(f"target_quantization {bits}", {"target": bits}) for bits in ("8bit", "4bit")]
        return known


def states_of_heads(heads: MedusaHeads) -> StatesOf:
    """Return what makes the states that each head's language-model head sees."""

    def states_of(hidden: Tensor) -> list[Tensor]:
        seen, size = hidden.to(heads.dtype), (len(hidden), heads.config.num_heads, hidden.shape[1])
        embeddings = seen.new_zeros(()).expand(size) if heads.config.hydra else None
        return [heads.states(i, seen, embeddings) for i in range(heads.config.num_heads)]

    return states_of
