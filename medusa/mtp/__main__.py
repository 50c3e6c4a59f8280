"""`accelerate launch -m draftsmith.medusa.mtp --config configs/mtp/tiny.yaml`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from draftsmith.decode.progress import phase
from draftsmith.medusa.memory import FeaturePlan
from draftsmith.medusa.mtp.config import MtpTrainingConfig
from draftsmith.medusa.mtp.heads import MtpHeads
from draftsmith.medusa.mtp.native import make_layers
from draftsmith.medusa.mtp.trainer import MtpTrainer, states_of_steps
from draftsmith.medusa.run import HeadsRun
from draftsmith.medusa.target_states import scale_of_steps
from draftsmith.train.data.first_look import few_texts, print_once
from draftsmith.train.files import identity
from draftsmith.train.job.ranks import leave, run_rank
from draftsmith.train.launch import launch
from draftsmith.train.losses.output_head import head_of

CARD = Path(__file__).with_name("card.md.j2")


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
        step_scale = partial(scale_of_steps, heads, self.states_of, texts, steps, states_of_steps)
        factor = step_scale(lambda: head_of(self.target), self.tokens, config.target_sharded)
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
