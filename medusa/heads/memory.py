"""The memory plan of a training run of Medusa heads."""

from dataclasses import replace

from torch import nn

from draftsmith.medusa.heads.backbone import Joint
from draftsmith.medusa.heads.model import MedusaHeads
from draftsmith.medusa.heads.trainer import MedusaTrainer, new_heads
from draftsmith.medusa.memory import HeadsPlan
from draftsmith.train.memory.states import Weights
from draftsmith.train.memory.trace import shadow


class MedusaPlan(HeadsPlan):
    """Medusa heads, and a target that may be trained with them (Medusa-2)."""

    trainer_class = MedusaTrainer

    def build(self) -> MedusaHeads:
        """Return the run's heads."""
        return self.made(  # type: ignore[no-any-return]
            MedusaHeads, lambda target, tokens: new_heads(self.config, target, tokens)
        )

    def joined(self) -> nn.Module:
        """Return the heads, with the target if it is trained too."""
        if not self.config.joint:
            return self.drafter  # type: ignore[no-any-return]
        joint = Joint(self.drafter, self.target, self.config)
        joint.thaw()
        shadow(self.mode, *joint._copy)
        return joint

    @property
    def sees_embeddings(self) -> bool:  # type: ignore[override]
        """Whether the heads see the target's embeddings: Hydra heads do."""
        return bool(self.config.hydra)

    def count(self) -> int:
        """Return the number of heads."""
        return int(self.drafter.config.num_heads)

    def weights(self) -> Weights:
        """Count the heads' numbers; FSDP gathers them part by part."""
        parts = (*self.drafter.all_lm_heads, *self.drafter.blocks)
        largest = max(sum(p.numel() for p in part.parameters()) for part in parts)
        return replace(super().weights(), largest_unit=largest, tail=0)

    def target_held(self) -> dict[str, float]:
        """Return the bytes that the target always takes; only those of a copy if all of it is trained."""
        if self.config.backbone != "full":
            return super().target_held()
        return {"the target as it was: weights in float32, whole": 4.0 * Weights.of(self.target).all}
