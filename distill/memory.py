"""The memory plan of a distillation run: the bytes of a draft model and its target at each moment of a step."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.draft_models.cut_vocabulary import kept_tokens
from draftsmith.decode.errors import InputError, at_most
from draftsmith.distill.config import DistillPlanConfig
from draftsmith.distill.draft_init import make_draft
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.distill.vocabulary import keep_tokens
from draftsmith.train.job.flops import Work
from draftsmith.train.lora import add_lora
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.losses.positions import LossPositions
from draftsmith.train.memory.activations import InPrecision, trace_cache
from draftsmith.train.memory.layers import shallow
from draftsmith.train.memory.moments import Moment
from draftsmith.train.memory.plan import read_config
from draftsmith.train.memory.setting import MemorySetting, gib
from draftsmith.train.memory.states import Weights
from draftsmith.train.memory.training import TracedStep, TrainingPlan
from draftsmith.train.teacher.cache_config import CacheConfig
from draftsmith.train.teacher.distribution_shards import NUMBERS, distribution_bytes
from draftsmith.train.teacher.feature_reader import holds_features


class DraftPlan(TrainingPlan):
    """A draft model and its target."""

    label = "draft"
    most_rows = 8191
    trainer_class = DistillTrainer

    def __init__(self, config: DistillPlanConfig):
        super().__init__(config)
        if config.teacher or (config.teacher_cache and holds_features(config.teacher_cache[0])):
            # The head makes distributions of the given states.
            self.setting = replace(self.setting, target="elsewhere")
        self._cache_bytes = lru_cache(partial(trace_cache, self.mode))
        self._check_length()

    def build(self, lm_heads: str) -> PreTrainedModel:
        """Return the run's initial draft."""
        config, init = self.config, self.config.init
        if config.draft is None:
            target = self.empty(self.target_shape, self.setting.target_dtype, "target")
            draft, _ = make_draft(None, init, target, _Tokens(target))  # type: ignore[arg-type]
        else:
            shape: Any = read_config(config.draft, config.draft_config, "draft", config.trust_remote_code)
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

    def _check_length(self) -> None:
        for field, model in (("target", self.target(self.setting.target_dtype)), ("draft", self.drafter(self.setting))):
            most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
            if most is not None and self.batch.length > most:
                raise InputError(f"sequence_length: expected at most the {field}'s {most}, found {self.batch.length}")

    def weights(self, drafter: PreTrainedModel) -> Weights:
        """Count the draft's numbers."""
        return Weights.of(drafter)

    def ends(self, drafter: PreTrainedModel) -> Sequence[nn.Module]:
        """Return embeddings and head."""
        return [drafter.get_input_embeddings(), drafter.get_output_embeddings()]

    def vocabulary(self, setting: MemorySetting) -> int:
        """Return the number of tokens that both models have, or that the draft proposes."""
        return common_vocabulary(*self.models(setting))

    def models(self, setting: MemorySetting) -> tuple[PreTrainedModel, PreTrainedModel | None]:
        """Return draft and target; None with a teacher cache."""
        target = None if setting.target is None else self.target(setting.target_dtype)
        return self.drafter(setting), target

    def trainer(self, step: TracedStep, **parts: Any) -> DistillTrainer:
        """Return the run's trainer without data."""
        draft, target = self.models(step.setting)
        size = min(len(head_of(model).weight) for model in (draft, target) if model is not None)
        parts |= {"config": self.config, "draft": draft, "vocab_size": size, "sizes": self.sizes}
        parts |= {"target": target, "target_ends": target}
        trainer = self.trainer_class.without_data(**parts)
        objective, tokens = self.config.objective, kept_tokens(draft.config)
        if not step.learns and step.positions is None:  # evaluations hold p of all tokens
            objective, tokens = Objective({"forward_kl": 1.0}), None
        trainer.compare_over(objective, tokens, size)
        if target is not None:
            _ = trainer.teacher_head  # is part of `target_held`
        return trainer

    def inputs(self, step: TracedStep, rows: int) -> dict[str, Any]:
        """Return a batch of a number of rows."""
        return self.batch.labelled(rows, positions=step.positions)

    def loss(self, step: TracedStep, rows: int, **seams: Any) -> Tensor:
        """Return the trainer's loss; the target's layers are counted separately."""
        trainer, inputs, k = self._trainers(step), self.inputs(step, rows), CacheConfig.k
        vars(trainer).update(seams)
        positions, draft = LossPositions(inputs["positions"][0]), trainer.draft
        if trainer.target is None:
            wide = {"ids": (k,), "log_p": (k,)}
            shapes = {name: (len(positions), *wide.get(name, ())) for name in NUMBERS}
            inputs["teacher"] = {name: torch.zeros(shapes[name], dtype=dtype) for name, dtype in NUMBERS.items()}
        # For the loss alone the draft's layers are not counted either.
        with shallow(trainer.target, None if step.positions is None else draft):
            return trainer.summed_loss(InPrecision(draft, step.setting.precision), inputs, positions)

    def eager_logits(self, setting: MemorySetting) -> float:
        """Return the bytes of a loss on whole logits: both models', their log-probabilities, and a gradient."""
        draft, target = self.models(setting)
        size = self.positions(setting.rows) * common_vocabulary(draft)
        width = 4 if setting.precision == "float32" else 2
        theirs = head_of(target).weight.element_size() if target is not None else 0
        return float(size * (2 * width + theirs + 8))

    def target_held(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes that the target takes at all times, and the copy of its head's rows of drafted tokens."""
        compares = setting.target is not None and self.config.objective.needs_target
        return super().target_held(setting) | (self.copied_head(setting) if compares else {})

    def target_forward(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes of the target's forward; empty if the objective does not need it."""
        return super().target_forward(setting) if self.config.objective.needs_target else {}

    def moments(self, setting: MemorySetting) -> list[Moment]:
        """Return the times at which memory may peak."""
        rows, draft, precision = setting.rows, self.drafter(setting), setting.precision
        parts, loss = self.step_bytes(setting), self.loss_bytes(setting, rows)
        copies = max(0.0, parts.in_loss.constant)
        moments = [
            Moment("the target's forward", self.target_forward(setting)),
            Moment(
                "the loss",
                {
                    "draft: copies of weights for autocast": copies,
                    "draft: activations, p's hidden states or distributions": parts.in_loss(rows) - copies,
                    "loss: logits of a chunk, gradients of head and hidden states": loss[0],
                },
            ),
            Moment(
                "the head's backward",
                {"draft: activations": parts.after_loss(rows), "loss: gradients of head and hidden states": loss[1]},
            ),
            Moment("the backward", {"draft: activations, one layer's backward": parts.backward(rows)}),
            self.optimizer_step(setting),
        ]
        if self.config.on_policy:
            cache = self._cache_bytes(draft, self.batch, precision)(rows)
            logits = 6 * 4 * rows * len(head_of(draft).weight)  # processors sort and copy
            moments.append(Moment("sampling", {"draft: keys and values": cache, "sampling: logits": float(logits)}))
        if rows := self.eval_rows:
            target = sum(super().target_forward(replace(setting, rows=rows)).values())
            evaluation, loss = self.step_bytes(setting, False), self.loss_bytes(setting, rows, False)
            of_draft = max(evaluation.forward(rows), evaluation.in_loss(rows) + loss[0])
            moments.append(Moment("evaluation", {"both models: activations": max(target, of_draft)}))
        return moments

    def drafter_operations(self, setting: MemorySetting) -> float | None:
        """Return the operations of a token; None where the draft's arithmetic is not known."""
        work, seen = Work.of(self.drafter(setting)), self.batch.length / 2
        if work is None:
            return None
        return work.step(1, seen, 1) + (work.forward(1, seen, 1) if setting.checkpointing else 0.0)

    def notes(self) -> list[str]:
        """Return lines about the loss on whole logits and in chunks, and the size of a teacher cache."""
        k, rows = CacheConfig.k, self.setting.rows
        return [
            f"the loss on whole logits would take {gib(self.eager_logits(self.setting))}; in chunks it takes "
            f"{gib(self.loss_bytes(self.setting, rows)[0])}",
            f"a teacher cache of k = {k}: {distribution_bytes(k)} bytes per completion token, uncompressed",
        ]

    def known_changes(self) -> list[tuple[str, str, Any]]:
        """Return changes that may help, including a teacher cache."""
        known = super().known_changes()
        config = self.config
        if not (config.teacher_cache or config.on_policy or config.teacher):
            known.append(("teacher_cache", "target", None))
        return known


class _Tokens:
    """A stand-in for a tokenizer with a token for each of a target's logits, which is all that a carved draft reads."""

    def __init__(self, target: PreTrainedModel):
        self.size: int = target.config.get_text_config().vocab_size

    def get_vocab(self) -> dict[str, int]:
        return {"": self.size - 1}


def common_vocabulary(*models: PreTrainedModel | None) -> int:
    """Return the number of tokens that all of these models have, or propose; None is no model."""
    given = [model for model in models if model is not None]
    kept = [kept_tokens(model.config) for model in given]
    return min(len(head_of(m).weight) if kept_D is None else len(kept_D) for m, kept_D in zip(given, kept, strict=True))
