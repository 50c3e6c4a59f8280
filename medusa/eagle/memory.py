"""The memory plan of a training run of EAGLE-3 heads: a forward of the target, and K steps."""

from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.initial import new_heads
from draftsmith.medusa.eagle.trainer import EagleTrainer
from draftsmith.medusa.memory import FeaturePlan


class EaglePlan(FeaturePlan):
    """EAGLE-3 heads on a frozen target."""

    trainer_class = EagleTrainer

    def build(self) -> EagleHeads:
        """Return the run's heads."""
        heads: EagleHeads = self.made(EagleHeads, lambda target, tokens: new_heads(self.config, target, tokens))
        heads.lm_head.requires_grad_(False)
        return heads
