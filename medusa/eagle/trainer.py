"""Training of EAGLE-3 heads: the training-time test on a frozen target (Li et al. 2025, section 3.2).

One forward of the target gives the features of three depths, the embeddings, and the last hidden states that its
distributions are made of. With a cache of features and last hidden states, the target's embeddings and head are enough.
The K steps of all rounds follow, and each step's loss is taken over a chunk of positions at a time: steps × tokens ×
vocabulary is never held. Shape suffixes: B rows, T positions, N chosen positions, K steps, H hidden.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.medusa.chains import ChainPlaces
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.unrolled import states_of_steps, work_of_steps
from draftsmith.medusa.seen import TargetStates
from draftsmith.medusa.trainer import FeaturesOf, FeatureTrainer
from draftsmith.train.data.examples import TrainingData
from draftsmith.train.job.flops import Work
from draftsmith.train.losses.distributions import LiveDistributions
from draftsmith.train.losses.inside_forward import open_forward
from draftsmith.train.losses.positions import LossPositions


class EagleTrainer(FeatureTrainer):
    """Minimises Σ_k decay^k · objective of step k, against the target's distribution or text, on completions.

    Evaluation replays held-out completions with a chain of K tokens, and reports `mean_acceptance_length`, `alpha`
    (of the first step), `loss`, and for each step k ≥ 1, which is step k − 1 of the paper, `accuracy_k`, the share of
    its tokens that it puts first, and `alpha_k`, its Σ_v min(p, q).
    """

    def __init__(
        self,
        heads: EagleHeads,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: EagleTrainingConfig,
        train_dataset: TrainingData,
        eval_dataset: TrainingData | None = None,
        **kwargs: Any,
    ):
        # Losses run inside of these: `train/losses/inside_forward.py`.
        open_forward(heads, heads.lm_head)
        count = config.num_steps
        super().__init__(heads, target, tokenizer, config, train_dataset, eval_dataset, count=count, **kwargs)

    def summed_loss(self, model: nn.Module, inputs: dict[str, Any], positions: LossPositions) -> Tensor:
        """Return Σ_k decay^k · the objective summed over step k's tokens."""
        seen = self.seen(inputs)

        def loss() -> Tensor:
            at = ChainPlaces(inputs, self.count)
            teacher = seen.hidden, self.teacher_head

            def of_states(*states: Tensor) -> Tensor:
                head = self.loss_head(self.heads.head)
                return self.chain_loss(at, states, lambda _: head, teacher)

            return self.heads.lm_head(*self._states(seen, inputs, at), inside=of_states)  # type: ignore[no-any-return]

        return model(inside=loss)  # type: ignore[no-any-return]

    def replay_sums(self, model: nn.Module, inputs: dict[str, Any], chosen_BT: Tensor) -> Tensor:
        """Return each sample's tokens, rounds and loss, and three sums a step, (B, 3 + 3K)."""
        seen = self.seen(inputs)

        def sums() -> Tensor:
            at = ChainPlaces(inputs, self.count)
            p = LiveDistributions(at.teacher(seen.hidden), self.target_head)

            def of_states(*states: Tensor) -> Tensor:
                head = self.loss_head(self.heads.head)

                def features(k: int, features_of: FeaturesOf) -> Tensor:
                    return features_of(states[k], head)

                return self.chain_sums(at, chosen_BT, p, features)

            return self.heads.lm_head(*self._states(seen, inputs, at), inside=of_states)  # type: ignore[no-any-return]

        return model(inside=sums)  # type: ignore[no-any-return]

    def _states(self, seen: TargetStates, inputs: dict[str, Any], at: ChainPlaces) -> list[Tensor]:
        """Return what the head sees of each step at the places where it learns, (N, H)."""
        return states_of_steps(self.heads, seen, inputs.get("position_ids"), at.flat, self.count)

    def trained_work(self) -> Work | None:
        """Return the arithmetic of the K steps."""
        return work_of_steps(self.heads, self.count)

    @property
    def ends(self) -> list[nn.Module]:
        """The one language-model head."""
        return [self.heads.lm_head]

    @property
    def cause_of_bad_new_heads(self) -> str:
        """They begin as a layer that is made for other states."""
        return "the layer does not follow these features; try another init"
