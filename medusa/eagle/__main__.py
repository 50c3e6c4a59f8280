"""`accelerate launch -m draftsmith.medusa.eagle --config configs/eagle/tiny.yaml`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from draftsmith.medusa.eagle.card import card
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.initial import beginning, new_heads, quieten, seen_before, seen_now
from draftsmith.medusa.eagle.trainer import EagleTrainer
from draftsmith.medusa.run import HeadsRun
from draftsmith.train.data.first_look import few_texts, say_once
from draftsmith.train.job.ranks import leave, run_rank
from draftsmith.train.launch import launch
from draftsmith.train.models import check_head
from draftsmith.train.teacher.feature_reader import FeatureCollator, FeatureIndex, find_features


class EagleRun(HeadsRun[EagleTrainingConfig]):
    """A run that trains EAGLE-3 heads."""

    heads_class = EagleHeads
    features: FeatureIndex | None = None
    """Of a teacher cache."""

    def read_small_files(self) -> None:
        """Look what a cache holds, and load the heads that are given."""
        if self.config.teacher_cache:
            self.features = find_features(self.config.teacher_cache, self.config, self.tokens)
        super().read_small_files()

    def load_target(self) -> PreTrainedModel | None:
        """Load the target, or its ends alone where a cache has its features."""
        if self.features is None:
            return super().load_target()
        target = self.features.load_target(self.config)
        check_head(target.config, self.tokenizer, "target")
        return target

    def new_heads(self) -> EagleHeads:
        """Return heads that begin at random, or as the target's last layer."""
        return new_heads(self.config, self.target, self.token_map)

    def check_heads(self) -> None:
        """Require that a cache has the features that the heads see."""
        if self.features is not None:
            self.features.require_layers(self.heads.layer_ids)

    def first_look(self) -> None:
        """Scale a copy of the target's last layer, unless its state behind the norm is handed on."""
        config, heads, target = self.config, self.heads, self.target
        start, clause = beginning(config, heads, target)
        say_once(f"init: heads {clause}")
        if start == "last_layer" and config.target_device != "auto" and not config.norm_output:
            look = partial(seen_now, target, heads.layer_ids)
            if self.features is not None:
                look = partial(seen_before, target, self.features)
            quieten(heads, look, few_texts(self.data), config.num_steps, self.tokens, config.target_sharded)

    def packed_models(self, model: PreTrainedModel) -> dict[str, PreTrainedModel]:
        """Return the target, unless a cache stands for its forwards."""
        return super().packed_models(model) if self.features is None else {}

    def make_trainer(self, model: EagleHeads) -> EagleTrainer:
        """Return the trainer."""
        trainer = EagleTrainer(model, self.target, self.tokenizer, self.config, self.data, self.heldout)
        if self.features is not None:
            trainer.data_collator = FeatureCollator(trainer.data_collator, self.features)
        return trainer

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
