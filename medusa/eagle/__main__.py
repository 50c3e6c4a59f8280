"""`accelerate launch -m draftsmith.medusa.eagle --config configs/eagle/tiny.yaml`: the training-time test.

EAGLE-3 heads on a frozen target (Li et al. 2025, section 3.2). The target's forward, or a cache, gives its features,
embeddings and last hidden states. The K steps of all rounds follow, and each step's loss is computed on a chunk of
positions at a time, so that steps × tokens × vocabulary is never held.
"""

from collections.abc import Sequence
from pathlib import Path

from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.initial import choose_init, new_heads
from draftsmith.medusa.memory import FeaturePlan
from draftsmith.medusa.run import HeadsRun
from draftsmith.medusa.trainer import FeatureTrainer, scale_of_steps
from draftsmith.train.data.first_look import few_texts, print_once
from draftsmith.train.job.flops import Work
from draftsmith.train.job.ranks import leave, run_rank
from draftsmith.train.launch import launch

CARD = Path(__file__).with_name("card.md.j2")


class EagleTrainer(FeatureTrainer):
    """The trainer that minimises Σ_k decay^k · objective of step k on completions, against the target or their text.

    Evaluations number the steps from 1: their step k is step k − 1 of the paper.
    """

    cause_of_bad_new_heads = "the layer does not follow these features; try another init"

    @staticmethod
    def guesses(heads: EagleHeads, config: EagleTrainingConfig) -> int:
        """Return K, the number of steps."""
        return config.num_steps

    def trained_work(self) -> Work | None:
        """Return the arithmetic of K steps: a layer and a head in each, and one fusion of the features."""
        heads, steps = self.heads, self.count
        return Work(
            Work.of_maps(*[heads.midlayer] * steps, heads.fc).head,
            Work.of_maps(*[heads.lm_head] * steps).head,
            2 * heads.midlayer.self_attn.q_proj.out_features * steps,
        )


class EagleRun(HeadsRun[EagleTrainingConfig]):
    """A run that trains EAGLE-3 heads."""

    heads_class, trainer_class = EagleHeads, EagleTrainer

    def new_heads(self) -> EagleHeads:
        """Return new heads: random, or the target's last layer."""
        return new_heads(self.config, self.target, self.token_map)

    def check_heads(self) -> None:
        """Require a cache's features; the language-model head stays the target's."""
        super().check_heads()
        self.heads.lm_head.requires_grad_(False)

    def first_look(self) -> None:
        """Print how the heads begin, and scale a copy of the target's last layer."""
        config, heads, target = self.config, self.heads, self.target
        start, clause = choose_init(config, heads, target)
        print_once(f"init: heads {clause}")
        # With `norm_output` the next step sees the state after the norm: scaling the norm would change that state.
        if start == "last_layer" and not config.norm_output:
            # The copy's inputs are not the layer's, and in later steps its own outputs: it is too confident.
            texts, steps, sharded = few_texts(self.data), config.num_steps, config.target_sharded
            head = lambda: heads.head  # noqa: E731
            scale = scale_of_steps(heads, self.states_of, texts, steps, head, self.tokens, sharded)
            heads.norm.weight.data.mul_(scale)

    def finish(self, trainer: EagleTrainer, output: Path) -> None:
        """Write the card."""
        self.write_card(trainer, output, CARD, "eagle3", num_steps=self.config.num_steps)


class EaglePlan(FeaturePlan):
    """EAGLE-3 heads on a frozen target."""

    trainer_class = EagleTrainer

    def build(self) -> EagleHeads:
        """Return the run's heads."""
        heads: EagleHeads = self.made(EagleHeads, lambda target, tokens: new_heads(self.config, target, tokens))
        heads.lm_head.requires_grad_(False)
        return heads


def train_heads(config: EagleTrainingConfig) -> EagleTrainer:
    """Train as the config says; the heads are in `config.training.output_dir` when this returns."""
    return EagleRun(config).train()  # type: ignore[return-value]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the config and train."""
    launch(EagleTrainingConfig, train_heads, argv, prog="draftsmith.medusa.eagle")


if __name__ == "__main__":
    leave(run_rank(main))
