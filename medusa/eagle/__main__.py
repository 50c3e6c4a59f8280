"""`accelerate launch -m draftsmith.medusa.eagle --config configs/eagle/tiny.yaml`."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from draftsmith.medusa.eagle.card import card
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.initial import beginning, new_heads, quieten
from draftsmith.medusa.eagle.trainer import EagleTrainer
from draftsmith.medusa.run import FeatureRun
from draftsmith.train.data.first_look import few_texts, say_once
from draftsmith.train.job.ranks import leave, run_rank
from draftsmith.train.launch import launch


class EagleRun(FeatureRun[EagleTrainingConfig]):
    """A run that trains EAGLE-3 heads."""

    heads_class = EagleHeads

    def new_heads(self) -> EagleHeads:
        """Return heads that begin at random, or as the target's last layer."""
        return new_heads(self.config, self.target, self.token_map)

    def first_look(self) -> None:
        """Scale a copy of the target's last layer, unless its state behind the norm is handed on."""
        config, heads, target = self.config, self.heads, self.target
        start, clause = beginning(config, heads, target)
        say_once(f"init: heads {clause}")
        if start == "last_layer" and config.target_device != "auto" and not config.norm_output:
            texts = few_texts(self.data)
            quieten(heads, self.seen_of(texts), texts, config.num_steps, self.tokens, config.target_sharded)

    def new_trainer(self, model: PreTrainedModel) -> EagleTrainer:
        """Return the trainer."""
        return EagleTrainer(model, self.target, self.tokenizer, self.config, self.data, self.heldout)  # type: ignore[arg-type]

    def finish(self, trainer: EagleTrainer, output: Path) -> None:
        """Write the card."""
        card(trainer).save(output / "README.md")


def train_heads(config: EagleTrainingConfig) -> EagleTrainer:
    """Train as the config says; the heads are in `config.training.output_dir` when this returns."""
    return EagleRun(config).train()  # type: ignore[return-value]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the config and train."""
    launch(EagleTrainingConfig, train_heads, argv, prog="draftsmith.medusa.eagle")


if __name__ == "__main__":
    leave(run_rank(main))
