"""Training of EAGLE-3 heads: the training-time test on a frozen target (Li et al. 2025, section 3.2).

The target's forward, or a cache, gives its features, embeddings and last hidden states. The K steps of all rounds
follow, and each step's loss is computed on a chunk of positions at a time, so that steps × tokens × vocabulary is never
held. Shape suffixes: B rows, T positions, N chosen positions, K steps, H hidden.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from draftsmith.medusa.chains import ChainPositions
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.unrolled import states_of_steps, work_of_steps
from draftsmith.medusa.target_states import TargetStates
from draftsmith.medusa.trainer import FeatureTrainer
from draftsmith.train.job.flops import Work
from draftsmith.train.losses.distributions import LiveDistributions
from draftsmith.train.losses.output_head import OutputHead
from draftsmith.train.losses.positions import LossPositions


class EagleTrainer(FeatureTrainer):
    """The trainer that minimises Σ_k decay^k · objective of step k on completions, against the target or their text.

    Evaluations number the steps from 1: their step k is step k − 1 of the paper.
    """

    cause_of_bad_new_heads = "the layer does not follow these features; try another init"

    @staticmethod
    def guesses(heads: EagleHeads, config: EagleTrainingConfig) -> int:
        """Return K, the number of steps."""
        return config.num_steps

    @staticmethod
    def loss_maps(heads: EagleHeads) -> list[nn.Module]:
        """Return the language-model head."""
        return [heads.lm_head]

    def summed_loss(self, model: nn.Module, inputs: dict[str, Any], positions: LossPositions) -> Tensor:
        """Return Σ_k decay^k · the objective summed over step k's tokens."""
        target_states, indices = self.target_states(inputs), ChainPositions(inputs, self.count)
        teacher = target_states.hidden, self.teacher_head

        def loss(states: Sequence[Tensor], head: OutputHead) -> Tensor:
            return self.chain_loss(indices, states, lambda _: head, teacher)

        return model(inside=lambda: self._inside_head(target_states, inputs, indices, loss))  # type: ignore[no-any-return]

    def replay_sums(self, model: nn.Module, inputs: dict[str, Any], chosen_BT: Tensor) -> Tensor:
        """Return each sample's tokens, rounds and loss, and three sums for each step, (B, 3 + 3K)."""
        target_states, positions = self.target_states(inputs), ChainPositions(inputs, self.count)

        def sums(states: Sequence[Tensor], head: OutputHead) -> Tensor:
            p = LiveDistributions(positions.teacher(target_states.hidden), self.target_head)
            return self.chain_sums(positions, chosen_BT, p, lambda k, features_of: features_of(states[k], head))

        return model(inside=lambda: self._inside_head(target_states, inputs, positions, sums))  # type: ignore[no-any-return]

    def _inside_head(
        self,
        target_states: TargetStates,
        inputs: dict[str, Any],
        positions: ChainPositions,
        function: Callable[[Sequence[Tensor], OutputHead], Tensor],
    ) -> Tensor:
        """Return a function of the steps' states and the head, called inside of the head's forward."""
        # The states are computed inside of the model's forward, and the loss inside of the head's.
        states = states_of_steps(self.heads, target_states, inputs.get("position_ids"), positions.flat, self.count)
        inside = lambda *states: function(states, self.loss_head(self.heads.head))  # noqa: E731
        return self.heads.lm_head(*states, inside=inside)  # type: ignore[no-any-return]

    def trained_work(self) -> Work | None:
        """Return the arithmetic of the K steps."""
        return work_of_steps(self.heads, self.count)

    @property
    def ends(self) -> list[nn.Module]:
        """None: the language-model head is not trained."""
        return []
