"""The memory plan of a training run of MTP layers: a forward of the target, and K steps."""

from draftsmith.medusa.memory import FeaturePlan
from draftsmith.medusa.mtp.heads import MtpHeads
from draftsmith.medusa.mtp.native import make_layers
from draftsmith.medusa.mtp.trainer import MtpTrainer


class MtpPlan(FeaturePlan):
    """MTP layers on a frozen target."""

    trainer_class = MtpTrainer

    def build(self) -> MtpHeads:
        """Return the run's layers."""
        config, target = self.config, self.target
        if config.heads is not None:
            heads = MtpHeads.as_stored(config.heads, target)
        elif config.begins_new:
            heads = MtpHeads(make_layers(target, config.num_layers or 1), target)
        else:
            heads = MtpHeads.as_shipped(config.target, target)
        return heads.float().requires_grad_(True)  # type: ignore[no-any-return]
