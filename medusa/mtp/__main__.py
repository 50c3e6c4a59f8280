"""`accelerate launch -m draftsmith.medusa.mtp --config configs/mtp/tiny.yaml`: MTP layers on a frozen target.

They share the target's head. The K steps of all rounds run on the target's last hidden states, and each step's loss is
computed on a chunk of positions at a time, so that steps × tokens × vocabulary is never held. The loss of step k has
the weight decay^k (DeepSeek-AI 2024, equation 25, with the target's distributions in place of its text; FastMTP for one
layer).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from draftsmith.decode.progress import phase
from draftsmith.medusa.memory import FeaturePlan
from draftsmith.medusa.mtp.config import MtpTrainingConfig
from draftsmith.medusa.mtp.heads import MtpHeads
from draftsmith.medusa.mtp.native import make_layers
from draftsmith.medusa.run import HeadsRun
from draftsmith.medusa.trainer import FeatureTrainer, scale_of_steps
from draftsmith.train.data.first_look import few_texts, print_once
from draftsmith.train.files import identity
from draftsmith.train.job.flops import Work
from draftsmith.train.job.ranks import leave, run_rank
from draftsmith.train.launch import launch
from draftsmith.train.losses.output_head import head_of

CARD = Path(__file__).with_name("card.md.j2")


class MtpTrainer(FeatureTrainer):
    """The trainer that minimises Σ_k decay^k · objective of step k on completions, against the target or their text."""

    cause_of_bad_new_heads = "the layers do not follow the target's states; try a lower training.learning_rate"

    @staticmethod
    def guesses(heads: MtpHeads, config: MtpTrainingConfig) -> int:
        """Return K, the number of steps."""
        return config.steps_of(len(heads.layers))

    def trained_work(self) -> Work | None:
        """Return the arithmetic of K steps, a layer and the target's head in each; None if a layer's is not known."""
        heads, steps = self.heads, self.count
        parts: Any = heads.layers
        layers = list(parts) if len(parts) > 1 else [*parts] * steps
        queries = getattr(getattr(parts[0].mtp_block, "self_attn", None), "q_proj", None)
        if not isinstance(queries, nn.Linear) or any(parameter.ndim == 3 for parameter in heads.parameters()):
            return None
        decoder, logits = Work.of_maps(*layers).head, heads.config.hidden_size * heads.config.vocab_size * steps
        return Work(decoder, logits, 2 * queries.out_features * steps, decoder / (decoder + logits))


class MtpRun(HeadsRun[MtpTrainingConfig]):
    """A run that trains MTP layers."""

    heads_class, trainer_class = MtpHeads, MtpTrainer

    def earlier_heads(self) -> None:
        """Return None: layers of an earlier run are made of the target's classes, once it is loaded."""

    def make_model(self) -> PreTrainedModel:
        """Return the layers of an earlier run, or others, in float32."""
        if self.config.heads is not None:
            self.heads = MtpHeads.from_directory(self.config.heads, self.target).float()
        return super().make_model()

    @phase("making the layers")
    def new_heads(self) -> MtpHeads:
        """Return the target's own layers, or new ones that begin as its last layer."""
        config = self.config
        if config.begins_new:
            heads = MtpHeads.of_target(self.target, config.num_layers or 1)
        else:
            heads = MtpHeads.native_to(self.target)
        return heads.float().requires_grad_(True)  # type: ignore[no-any-return]

    def check_heads(self) -> None:
        """Record the target. Of a cache the layers see the last hidden states alone."""
        config = self.config
        self.heads.config.base_model_name_or_path = config.target
        self.heads.config.target_files = identity(config.target)

    def first_look(self) -> None:
        """Scale the last norm of new layers by the factor with the least loss of all K steps."""
        config, heads = self.config, self.heads
        if not config.begins_new:
            print_once(f"init: the target's own MTP layers, from {config.target}")
            return
        steps, texts = config.steps_of(len(heads.layers)), few_texts(self.data)
        head, sharded = lambda: head_of(self.target), config.target_sharded
        factor = scale_of_steps(heads, self.states_of, texts, steps, head, self.tokens, sharded)
        heads.scale(factor)
        print_once(f"init: new MTP layers begun as the target's last layer, logits × {factor:g}")

    def finish(self, trainer: MtpTrainer, output: Path) -> None:
        """Write the card."""
        self.write_card(trainer, output, CARD, "mtp", num_steps=trainer.count, layers=len(trainer.heads.layers))


class MtpPlan(FeaturePlan):
    """MTP layers on a frozen target."""

    trainer_class = MtpTrainer

    def build(self) -> MtpHeads:
        """Return the run's layers."""
        config, target = self.config, self.target
        if config.heads is not None:
            heads = MtpHeads.as_stored(config.heads, target)
        elif config.begins_new:
            heads = MtpHeads(make_layers(target, config.num_layers or 1), target)
        else:
            heads = MtpHeads.as_shipped(config.target, target)
        return heads.float().requires_grad_(True)  # type: ignore[no-any-return]


def train_heads(config: MtpTrainingConfig) -> MtpTrainer:
    """Train as the config says; the layers are in `config.training.output_dir` when this returns."""
    return MtpRun(config).train()  # type: ignore[return-value]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the config and train."""
    launch(MtpTrainingConfig, train_heads, argv, prog="draftsmith.medusa.mtp")


if __name__ == "__main__":
    leave(run_rank(main))
