"""Training of EAGLE-3 heads: the training-time test on a frozen target (Li et al. 2025, section 3.2).

The target's forward, or a cache, gives its features, embeddings and last hidden states. The K steps of all rounds
follow, and each step's loss is computed on a chunk of positions at a time, so that steps × tokens × vocabulary is never
held. Shape suffixes: B rows, T positions, N chosen positions, K steps, H hidden.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.unrolled import states_of_steps, work_of_steps
from draftsmith.medusa.trainer import FeatureTrainer
from draftsmith.train.job.flops import Work
from draftsmith.train.losses.output_head import OutputHead


class EagleTrainer(FeatureTrainer):
    """The trainer that minimises Σ_k decay^k · objective of step k on completions, against the target or their text.

    Evaluations number the steps from 1: their step k is step k − 1 of the paper.
    """

    states_of_steps = staticmethod(states_of_steps)
    cause_of_bad_new_heads = "the layer does not follow these features; try another init"

    @staticmethod
    def guesses(heads: EagleHeads, config: EagleTrainingConfig) -> int:
        """Return K, the number of steps."""
        return config.num_steps

    @staticmethod
    def loss_maps(heads: EagleHeads) -> list[nn.Module]:
        """Return the language-model head."""
        return [heads.lm_head]

    def with_head(self, function: Callable[[Sequence[Tensor], OutputHead], Tensor], states: list[Tensor]) -> Tensor:
        """Return a function of all steps' states and the head, called inside of the head's forward."""
        inside = lambda *states: function(states, self.loss_head(self.heads.head))  # noqa: E731
        return self.heads.lm_head(*states, inside=inside)  # type: ignore[no-any-return]

    def trained_work(self) -> Work | None:
        """Return the arithmetic of the K steps."""
        return work_of_steps(self.heads, self.count)
