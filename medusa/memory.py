"""Memory plans of heads on a target."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.errors import at_most
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.memory.plan import TrainingPlan


class HeadsPlan(TrainingPlan):
    """Heads and their target."""

    label = "heads"
    sees_embeddings = True
    """Whether the heads see the target's embeddings."""

    def made(self, heads_class: Any, new: Callable[[PreTrainedModel, Tensor | None], Any]) -> Any:
        """Return the run's initial heads without data: those of `config.heads`, or new ones.

        `new` makes them for a target and the tokens that they may draft, None for all.
        """
        config, count = self.config, self.config.draft_vocabulary
        if config.heads is not None:
            heads = heads_class.without_weights(config.heads)
        else:
            vocab_size = self.target.config.get_text_config().vocab_size
            at_most(vocab_size).check("draft_vocabulary", count or vocab_size)
            heads = new(self.target, None if count is None else torch.arange(count, device="cpu"))
        heads.check_fits(self.target)
        return heads.float().requires_grad_(True)

    def count(self) -> int:
        """Return the number of guesses."""
        return self.trainer_class.guesses(self.drafter, self.config)  # type: ignore[no-any-return]

    def parts(self) -> dict[str, Any]:
        """Return the attributes of the kind's trainer that its loss reads."""
        heads = self.drafter
        parts = {"heads": heads, "embed": self.target.get_input_embeddings(), "count": self.count()}
        return parts | {"vocab_size": heads.config.vocab_size}

    def make_trainer(self) -> Any:
        """Return the run's trainer without data, whose loss is traced."""
        trainer = super().make_trainer()
        trainer.compare_over(self.config.objective, self.drafter.token_map, self.drafter.config.vocab_size)
        return trainer

    def target_held(self) -> dict[str, float]:
        """Return the bytes that the target takes at all times; its ends alone, if its states are given."""
        if not self.config.states_given:
            return super().target_held()
        embed: Any = self.target.get_input_embeddings()
        ends = [head_of(self.target).weight] + [embed.weight] * self.sees_embeddings
        size = sum({id(weight): weight.nbytes for weight in ends}.values())  # tied weights once
        return {f"target: {'embeddings and ' * self.sees_embeddings}head": float(size)}


class FeaturePlan(HeadsPlan):
    """Heads on features of a frozen target."""

    @property
    def layer_ids(self) -> list[int]:
        """The layers whose features the heads see."""
        return list(self.drafter.layer_ids)
