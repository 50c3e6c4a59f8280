"""The memory plan of a training run of EAGLE-3 heads: a forward of the target, and K steps."""

from collections.abc import Sequence

from torch import nn

from draftsmith.medusa.eagle.config import EaglePlanConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.initial import new_heads
from draftsmith.medusa.eagle.trainer import EagleTrainer
from draftsmith.medusa.eagle.unrolled import work_of_steps
from draftsmith.medusa.memory import FeaturePlan
from draftsmith.train.job.flops import Work
from draftsmith.train.memory.setting import MemorySetting


class EaglePlan(FeaturePlan):
    """EAGLE-3 heads on a frozen target."""

    part, trainer_class = "steps", EagleTrainer
    config: EaglePlanConfig

    def build(self, lm_heads: str) -> EagleHeads:
        """Return the run's heads."""
        config = self.config
        heads: EagleHeads = self.made(config, EagleHeads, lambda target, tokens: new_heads(config, target, tokens))
        heads.lm_head.requires_grad_(False)
        return heads

    def ends(self, drafter: EagleHeads) -> Sequence[nn.Module]:
        """Return none: the language-model head is not trained."""
        return []

    def work(self, setting: MemorySetting) -> Work:
        """Return the arithmetic of the K steps."""
        return work_of_steps(self.drafter(setting), self.config.num_steps)

    def notes(self) -> list[str]:
        """Return a line that describes the heads."""
        shape = self.drafter(self.setting).config
        depths = ", ".join(map(str, shape.eagle_aux_hidden_state_layer_ids))
        tokens = f"{shape.draft_vocab_size:,} of {shape.vocab_size:,} tokens"
        return [f"{self.config.num_steps} steps of one layer, features after layers {depths}, drafts among {tokens}"]
