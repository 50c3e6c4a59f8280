"""The memory plan of a training run of MTP layers: a forward of the target, and K steps."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from draftsmith.medusa.memory import FeaturePlan
from draftsmith.medusa.mtp.config import MtpPlanConfig
from draftsmith.medusa.mtp.heads import MtpHeads
from draftsmith.medusa.mtp.native import make_layers
from draftsmith.medusa.mtp.trainer import MtpTrainer, work_of_steps
from draftsmith.train.kinds.quantities import count_of
from draftsmith.train.memory.setting import MemorySetting


class MtpPlan(FeaturePlan):
    """MTP layers on a frozen target."""

    part, trainer_class = "steps", MtpTrainer
    config: MtpPlanConfig

    def build(self, lm_heads: str) -> MtpHeads:
        """Return the run's layers."""
        config, target = self.config, self.target(self.setting.target_dtype)
        if config.heads is not None:
            heads, self._begun = MtpHeads.as_stored(config.heads, target), f"from {config.heads}"
        elif config.begins_new:
            heads = MtpHeads(make_layers(target, config.num_layers or 1), target)
            self._begun = "begun as the target's last layer"
        else:
            heads, self._begun = MtpHeads.as_shipped(config.target, target), "the target's own"
        return heads.float().requires_grad_(True)  # type: ignore[no-any-return]

    def ends(self, drafter: MtpHeads) -> Sequence[nn.Module]:
        """Return none: the head is the target's."""
        return []

    def drafter_operations(self, setting: MemorySetting) -> float | None:
        """Return the operations of the K steps for a token to learn from; None where a layer's are not known."""
        heads = self.drafter(setting)
        work = work_of_steps(heads, self.count(heads))
        return None if work is None else work.step(1, self.batch.length / 2, 1)

    def notes(self) -> list[str]:
        """Return a line that describes the layers."""
        heads = self.drafter(self.setting)
        return [f"{count_of(self.count(heads), 'step')} of {count_of(len(heads.layers), 'MTP layer')}, {self._begun}"]

    def known_changes(self) -> list[tuple[str, str, Any]]:
        """Return changes that may help, but no checkpointing."""
        return [change for change in super().known_changes() if change[1] != "checkpointing"]
