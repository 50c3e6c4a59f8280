"""`accelerate launch -m draftsmith.medusa.heads --config configs/medusa/tiny.yaml`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from draftsmith.medusa.heads.backbone import Joint
from draftsmith.medusa.heads.config import MedusaTrainingConfig
from draftsmith.medusa.heads.formats.export import refusal
from draftsmith.medusa.heads.model import MedusaHeads
from draftsmith.medusa.heads.trainer import MedusaTrainer, new_heads
from draftsmith.medusa.memory import HeadsPlan
from draftsmith.medusa.run import HeadsRun
from draftsmith.medusa.target_states import TargetStates
from draftsmith.train.data.first_look import (
    SCALES,
    Text,
    choose_once,
    few_texts,
    losses_of_scales,
    print_once,
    stack_guesses,
)
from draftsmith.train.job.ranks import leave, run_rank
from draftsmith.train.kinds.export import vllm_command
from draftsmith.train.launch import launch
from draftsmith.train.losses.cut_vocabulary import CutVocabulary
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.memory.states import Weights
from draftsmith.train.memory.trace import shadow
from draftsmith.train.teacher.state_cache import StateCache

CARD = Path(__file__).with_name("card.md.j2")


class MedusaRun(HeadsRun[MedusaTrainingConfig]):
    """A run that trains Medusa or Hydra heads."""

    heads_class, trainer_class = MedusaHeads, MedusaTrainer

    def new_heads(self) -> MedusaHeads:
        """Return heads that begin as copies of the target's own."""
        return new_heads(self.config, self.target, self.token_map)

    def first_look(self) -> None:
        """Scale each copy."""
        scale_logits(self.heads, self.states_of, few_texts(self.data), self.tokens, self.config.target_sharded)

    def finish(self, trainer: MedusaTrainer, output: Path) -> None:
        """Write the card."""
        config = trainer.heads.config
        speculative = {"method": "medusa", "model": "VLLM", "num_speculative_tokens": config.num_heads}
        serve = vllm_command(config.base_model_name_or_path or "TARGET", speculative)
        name = "Hydra" if config.hydra else "Medusa"
        fields = {"name": name, "refusal": refusal(trainer.heads, "vllm"), "serve": serve}
        self.write_card(trainer, output, CARD, name.lower(), **fields)


@torch.no_grad()
def scale_logits(
    heads: MedusaHeads,
    states_of: Callable[[Text], TargetStates],
    texts: Sequence[Text],
    tokens: int,
    sharded: bool = False,
) -> None:
    """Scale each language-model head by the factor with the least loss on some texts, and print the factors.

    A copy of the target's head is made for the next token, and too confident about those after it: on SmolLM2-135M
    copies begin at 6.6 to 7.0 nats from the target, half as large ones at 4.7 to 4.9, and a uniform distribution at
    6.2. `states_of` returns the target's states of a text. The target's head may have more rows than the tokenizer has
    `tokens`; if `sharded`, its forward needs all processes.
    """
    count = heads.config.num_heads

    def look() -> tuple[list[float], list[float], list[float]]:
        head = heads.head(0)
        hidden = [states_of(text).hidden[0].to(head.weight.device) for text in texts]
        # Head i guesses the token 2 + i further; the target's own head guesses the one 1 further.
        hidden_NH, labels_NK = stack_guesses(texts, hidden, 1 + count)
        if heads.token_map is None:
            head = head.cut(tokens)
        else:
            cut = CutVocabulary(heads.token_map, heads.config.vocab_size)
            # Tokens outside of a cut vocabulary become IGNORED too.
            labels_NK = torch.where(labels_NK == IGNORED, IGNORED, cut.labels(labels_NK.clamp(min=0)))
        losses_SK = losses_of_scales(hidden_NH, head, labels_NK[:, 1:])
        if heads.config.original_lm_head:
            losses_SK = losses_SK.mean(1, keepdim=True)  # one head for all guesses needs one factor
        best = losses_SK.min(0)
        return [SCALES[index] for index in best.indices.tolist()], best.values.tolist(), losses_SK[0].tolist()

    scales, *losses = choose_once(look, together=sharded)
    for lm_head, scale in zip(heads.all_lm_heads, scales, strict=True):
        lm_head.weight.mul_(scale)
    factors, scaled, plain = (", ".join(f"{value:.3g}" for value in values) for values in (scales, *losses))
    print_once(f"init: the target's head × {factors}: losses begin at {scaled} ({plain} without)")


class MedusaPlan(HeadsPlan):
    """Medusa heads, and a target that may be trained with them (Medusa-2)."""

    trainer_class = MedusaTrainer

    def build(self) -> MedusaHeads:
        """Return the run's heads."""
        return self.made(  # type: ignore[no-any-return]
            MedusaHeads, lambda target, tokens: new_heads(self.config, target, tokens)
        )

    def joined(self) -> nn.Module:
        """Return the heads, with the target if it is trained too."""
        if not self.config.joint:
            return self.drafter  # type: ignore[no-any-return]
        joint = Joint(self.drafter, self.target, self.config)
        joint.thaw()
        shadow(self.mode, *joint._copy)
        return joint

    @property
    def sees_embeddings(self) -> bool:  # type: ignore[override]
        """Whether the heads see the target's embeddings: Hydra heads do."""
        return bool(self.config.hydra)

    def count(self) -> int:
        """Return the number of heads."""
        return int(self.drafter.config.num_heads)

    def weights(self) -> Weights:
        """Count the heads' numbers; FSDP gathers them part by part."""
        parts = (*self.drafter.all_lm_heads, *self.drafter.blocks)
        largest = max(sum(p.numel() for p in part.parameters()) for part in parts)
        return replace(super().weights(), largest_unit=largest, tail=0)

    def target_held(self) -> dict[str, float]:
        """Return the bytes that the target always takes; only those of a copy if all of it is trained."""
        if self.config.backbone != "full":
            return super().target_held()
        return {"the target as it was: weights in float32, whole": 4.0 * Weights.of(self.target).all}


def train_heads(config: MedusaTrainingConfig, state_cache: StateCache | None = None) -> MedusaTrainer:
    """Train as the config says; the heads are in `config.training.output_dir` when this returns.

    With a `state_cache` of the target no text needs a second forward of it.
    """
    run = MedusaRun(config)
    run.state_cache = state_cache
    return run.train()  # type: ignore[return-value]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the config and train."""
    launch(MedusaTrainingConfig, train_heads, argv, prog="draftsmith.medusa.heads")


if __name__ == "__main__":
    leave(run_rank(main))
