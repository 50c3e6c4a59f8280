"""`accelerate launch -m draftsmith.medusa.eagle --config configs/eagle/tiny.yaml`."""

from collections.abc import Sequence
from pathlib import Path

from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.initial import choose_init, new_heads, scale_logits
from draftsmith.medusa.eagle.trainer import EagleTrainer
from draftsmith.medusa.run import HeadsRun
from draftsmith.train.data.first_look import few_texts, print_once
from draftsmith.train.job.ranks import leave, run_rank
from draftsmith.train.launch import launch

CARD = Path(__file__).with_name("card.md.j2")


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
        if start == "last_layer" and config.target_device != "auto" and not config.norm_output:
            texts = few_texts(self.data)
            scale_logits(heads, self.states_of, texts, config.num_steps, self.tokens, config.target_sharded)

    def finish(self, trainer: EagleTrainer, output: Path) -> None:
        """Write the card."""
        self.write_card(trainer, output, CARD, "eagle3", num_steps=self.config.num_steps)


def train_heads(config: EagleTrainingConfig) -> EagleTrainer:
    """Train as the config says; the heads are in `config.training.output_dir` when this returns."""
    return EagleRun(config).train()  # type: ignore[return-value]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the config and train."""
    launch(EagleTrainingConfig, train_heads, argv, prog="draftsmith.medusa.eagle")


if __name__ == "__main__":
    leave(run_rank(main))
