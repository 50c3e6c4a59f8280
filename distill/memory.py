"""The memory plan of a distillation run."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.draft_models.cut_vocabulary import kept_tokens
from draftsmith.decode.errors import at_most
from draftsmith.distill.draft_init import make_draft
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.distill.vocabulary import keep_tokens
from draftsmith.train.lora import add_lora
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.memory.plan import TrainingPlan, read_config
from draftsmith.train.memory.states import Weights, target_bytes
from draftsmith.train.memory.trace import BatchShape
from draftsmith.train.teacher.cache_config import CacheConfig
from draftsmith.train.teacher.distribution_shards import NUMBERS
from draftsmith.train.teacher.feature_reader import holds_features


class DraftPlan(TrainingPlan):
    """A draft model and its target."""

    label = "draft"
    trainer_class = DistillTrainer

    def build(self) -> PreTrainedModel:
        """Return the run's initial draft."""
        config, init = self.config, self.config.init
        if config.draft is None:
            target = self.empty(self.target_shape, self.dtype, "target")
            draft, _ = make_draft(None, init, target, _Tokens(target))  # type: ignore[arg-type]
        else:
            shape = read_config(config.draft, "draft", config.trust_remote_code)
            if init.pad_vocabulary:
                text = shape.get_text_config()
                text.vocab_size = max(text.vocab_size, self.target_shape.get_text_config().vocab_size)
            draft = self.empty(shape, "float32", "draft").requires_grad_(True)
            if init.lora is not None:
                add_lora(draft, init.lora)
        if init.draft_vocabulary is not None:  # which tokens they are does not matter
            at_most(draft.config.get_text_config().vocab_size).check("init.draft_vocabulary", init.draft_vocabulary)
            keep_tokens(draft, range(init.draft_vocabulary))
        return draft

    @property
    def distributions(self) -> bool:
        """Whether a cache has the target's distributions, for which its head is not needed."""
        return bool(self.config.teacher_cache) and not holds_features(self.config.teacher_cache[0])

    def weights(self) -> Weights:
        """Count the draft's numbers."""
        return Weights.of(self.drafter)

    def make_trainer(self) -> Any:
        """Return the run's trainer without data, whose loss is traced."""
        trainer, models = super().make_trainer(), [self.drafter]
        if self.distributions:
            trainer.target_ends = None
        else:
            models.append(self.target)
        trainer.draft, trainer.vocab_size = self.drafter, min(len(head_of(model).weight) for model in models)
        trainer.compare_over(self.config.objective, kept_tokens(self.drafter.config), trainer.vocab_size)
        return trainer

    def states(self, batch: BatchShape) -> dict[str, Tensor]:
        """Return the target's states or distributions of a batch, as a cache has them."""
        if not self.distributions:
            return super().states(batch)
        count, wide = batch.rows * (batch.length - 1), {"ids": (CacheConfig.k,), "log_p": (CacheConfig.k,)}
        return {name: torch.zeros(count, *wide.get(name, ()), dtype=dtype) for name, dtype in NUMBERS.items()}

    def target_held(self) -> dict[str, float]:
        """Return the bytes that the target takes at all times: its head, if its states are given."""
        given = self.config.states_given and not self.distributions
        return target_bytes(self.target, "elsewhere", 1) if given else super().target_held()


class _Tokens:
    """A stand-in for a tokenizer with a token for each of a target's logits, which is all that a carved draft reads."""

    def __init__(self, target: PreTrainedModel):
        self.size: int = target.config.get_text_config().vocab_size

    def get_vocab(self) -> dict[str, int]:
        return {"": self.size - 1}
