"""`accelerate launch -m draftsmith.medusa --config configs/medusa/tiny.yaml`."""

from collections.abc import Sequence
from pathlib import Path

from draftsmith.medusa.heads.beginning import quieten
from draftsmith.medusa.heads.card import card
from draftsmith.medusa.heads.config import MedusaTrainingConfig
from draftsmith.medusa.heads.model import MedusaHeads
from draftsmith.medusa.heads.trainer import MedusaTrainer
from draftsmith.medusa.run import HeadsRun
from draftsmith.train.data.first_look import few_texts
from draftsmith.train.job.ranks import leave, run_rank
from draftsmith.train.launch import launch
from draftsmith.train.teacher.kept_states import KeptStates


class MedusaRun(HeadsRun[MedusaTrainingConfig]):
    """A run that trains Medusa or Hydra heads."""

    heads_class = MedusaHeads

    def new_heads(self) -> MedusaHeads:
        """Return copies of the target's head behind blocks that change nothing."""
        config = self.config
        return MedusaHeads.of_target(  # type: ignore[no-any-return]
            self.target,
            config.num_heads,
            token_map=self.token_map,
            num_hidden_layers=config.num_layers,
            medusa_fc_bias=config.bias,
            original_lm_head=config.lm_heads == "shared",
            hydra=config.hydra,
            base_model_name_or_path=config.target,
        ).float()

    def first_look(self) -> None:
        """Scale each copy, but of a target that lies on several devices."""
        config = self.config
        if config.train_lm_heads and config.target_device != "auto":
            quieten(self.heads, self.target, few_texts(self.data), self.tokens, config.target_sharded)

    def make_trainer(self, model: MedusaHeads) -> MedusaTrainer:
        """Return the trainer."""
        return MedusaTrainer(model, self.target, self.tokenizer, self.config, self.data, self.heldout)

    def finish(self, trainer: MedusaTrainer, output: Path) -> None:
        """Write the card."""
        card(trainer.heads, **trainer.acceptance).save(output / "README.md")


def train_heads(config: MedusaTrainingConfig, kept: KeptStates | None = None) -> MedusaTrainer:
    """Train as the config says; the heads are in `config.training.output_dir` when this returns.

    Where the target's states are `kept`, no text needs a second forward of it.
    """
    run = MedusaRun(config)
    run.kept = kept
    return run.train()  # type: ignore[return-value]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the config and train."""
    launch(MedusaTrainingConfig, train_heads, argv, prog="draftsmith.medusa")


if __name__ == "__main__":
    leave(run_rank(main))
