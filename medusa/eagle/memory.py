"""The memory plan of a training run of EAGLE-3 heads: a forward of the target, and K steps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.kernels import computing_dtype
from draftsmith.medusa.eagle.config import EaglePlanConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.initial import new_heads
from draftsmith.medusa.eagle.unrolled import states_of_steps, work_of_steps
from draftsmith.medusa.memory import FeaturePlan, Guesses, fake_target_states
from draftsmith.medusa.target_states import TargetStates
from draftsmith.train.job.flops import Work
from draftsmith.train.memory.activations import Forward
from draftsmith.train.memory.setting import MemorySetting


class EaglePlan(FeaturePlan):
    """EAGLE-3 heads on a frozen target."""

    part = "steps"
    config: EaglePlanConfig

    def build(self, lm_heads: str) -> EagleHeads:
        """Return the run's heads."""
        config = self.config
        return self.made(config, EagleHeads, lambda target, tokens: new_heads(config, target, tokens))  # type: ignore[no-any-return]

    def ends(self, drafter: EagleHeads) -> Sequence[nn.Module]:
        """Return the language-model head."""
        return [drafter.lm_head]

    def positions(self, rows: int) -> int:
        """Return the positions with a loss, if all tokens but each row's first belong to a completion."""
        return rows * max(self.batch.length - 2, 1)

    def forward(self, dtype: str) -> Forward:
        """Return a forward of the K steps over the target's states of a batch."""
        target, num_steps, length = self.target(dtype), self.config.num_steps, self.batch.length

        def forward(heads: EagleHeads, inputs: dict[str, Tensor]) -> tuple[Sequence[Tensor], TargetStates]:
            rows = len(inputs["input_ids"])
            states = fake_target_states(target, len(heads.layer_ids), rows, length)
            position_ids = self.batch.inputs(rows).get("position_ids")
            # The positions do not change the memory: take zeros.
            positions = torch.zeros(rows * max(length - 2, 1), dtype=torch.long)
            return states_of_steps(heads, states, position_ids, positions, num_steps), states

        return forward

    def guesses(self, heads: EagleHeads, target: PreTrainedModel, positions: int) -> Guesses:
        """Return the steps' guesses; the states are counted with the steps, but the losses hold their gradients."""
        shape, dtype = (positions, heads.config.hidden_size), computing_dtype(heads.lm_head.weight)
        states = [torch.zeros(shape, dtype=dtype, requires_grad=True) for _ in range(self.config.num_steps)]
        return lambda _: states, lambda _: heads.head, states

    def work(self, setting: MemorySetting) -> Work:
        """Return the arithmetic of the K steps."""
        return work_of_steps(self.drafter(setting), self.config.num_steps)

    def notes(self) -> list[str]:
        """Return a line that describes the heads."""
        shape = self.drafter(self.setting).config
        depths = ", ".join(map(str, shape.eagle_aux_hidden_state_layer_ids))
        tokens = f"{shape.draft_vocab_size:,} of {shape.vocab_size:,} tokens"
        return [f"{self.config.num_steps} steps of one layer, features after layers {depths}, drafts among {tokens}"]

    def known_changes(self) -> list[tuple[str, str, Any]]:
        """Return changes that may help: also a cache of features."""
        return super().known_changes() + [("teacher_cache", "target", None)] * (self.setting.target is not None)
