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
from draftsmith.distill.vocabulary import keep_tokens
from draftsmith.train.job.flops import Work
from draftsmith.train.lora import add_lora
from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.chunked import chunked_objective
from draftsmith.train.losses.cut_vocabulary import LossVocabulary
from draftsmith.train.losses.distributions import CachedDistributions, LiveDistributions, TeacherDistributions
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead, head_of
from draftsmith.train.memory.activations import (
    BatchShape,
    tensors_of,
    through_chunks,
    trace_cache,
    trace_loss,
)
from draftsmith.train.memory.moments import Moment
from draftsmith.train.memory.plan import read_config
from draftsmith.train.memory.setting import MemorySetting, Precision, gib
from draftsmith.train.memory.states import Weights
from draftsmith.train.memory.training import TrainingPlan
from draftsmith.train.teacher.distribution_shards import distribution_bytes


class DraftPlan(TrainingPlan):
    """A draft model and its target."""

    label = "draft"
    most_rows = 8191

    def __init__(self, config: DistillPlanConfig):
        super().__init__(config)
        self._losses = lru_cache(partial(trace_draft_loss, self.mode, config.objective, self.sizes, config.cache_k))
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

    @property
    def draft_batch(self) -> BatchShape:
        """The draft's input in training."""
        return self.batch

    @property
    def evaluated_batch(self) -> BatchShape:
        """Its input in evaluation."""
        return self.batch

    def positions(self, rows: int) -> int:
        """Return the loss positions in the worst case, in which all tokens belong to completions."""
        return rows * (self.draft_batch.entries - 1)

    def models(self, setting: MemorySetting) -> tuple[PreTrainedModel, PreTrainedModel | None]:
        """Return draft and target; None with a teacher cache."""
        target = None if setting.target is None else self.target(setting.target_dtype)
        return self.drafter(setting), target

    def loss_bytes(self, setting: MemorySetting, rows: int) -> tuple[float, float]:
        """Return `trace_draft_loss`."""
        models = self.models(setting)
        chunk = max(1, self.sizes.chunk // common_vocabulary(*models))
        return through_chunks(partial(self._losses, *models, setting.precision), self.positions(rows), chunk)

    def teacher_bytes(self, setting: MemorySetting, rows: int) -> float:
        """Return the bytes that p is computed from: the target's hidden states, or its cached distributions."""
        if not self.config.objective.needs_target:
            return 0.0
        positions = rows * (self.batch.length - 1)
        if setting.target is None:
            return float(positions * distribution_bytes(self.config.cache_k))
        weight = head_of(self.target(setting.target_dtype)).weight
        return float(positions * weight.shape[1] * weight.element_size())

    def eager_logits(self, setting: MemorySetting) -> float:
        """Return the bytes of a loss on whole logits: both models', their log-probabilities, and a gradient."""
        draft, target = self.models(setting)
        size = self.positions(setting.rows) * common_vocabulary(draft)
        width = 4 if setting.precision == "float32" else 2
        theirs = head_of(target).weight.element_size() if target is not None else 0
        return float(size * (2 * width + theirs + 8))

    def target_forward(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes of the target's forward; empty if the objective does not need it."""
        return super().target_forward(setting) if self.config.objective.needs_target else {}

    def moments(self, setting: MemorySetting) -> list[Moment]:
        """Return the times at which memory may peak."""
        rows, draft, precision = setting.rows, self.drafter(setting), setting.precision
        parts = self.step_bytes(draft, self.draft_batch, precision, setting.checkpointing)
        loss, copies = self.loss_bytes(setting, rows), max(0.0, parts.in_loss.constant)
        moments = [
            Moment("the target's forward", self.target_forward(setting)),
            Moment(
                "the loss",
                {
                    "draft: copies of weights for autocast": copies,
                    "draft: activations": parts.in_loss(rows) - copies,
                    "p's hidden states or distributions": self.teacher_bytes(setting, rows),
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
            target = sum(self.target_forward(replace(setting, rows=rows)).values())
            forward = self.forward_bytes(draft, self.evaluated_batch, precision)(rows)
            of_draft = self.teacher_bytes(setting, rows) + max(forward, self.loss_bytes(setting, rows)[0])
            moments.append(Moment("evaluation", {"both models: activations": max(target, of_draft)}))
        return moments

    def drafter_operations(self, setting: MemorySetting) -> float | None:
        """Return the operations of a token; None for a mixture of experts."""
        work, seen = Work.of(self.drafter(setting)), self.batch.length / 2
        if work is None:
            return None
        return work.step(1, seen, 1) + (work.forward(1, seen, 1) if setting.checkpointing else 0.0)

    def notes(self) -> list[str]:
        """Return lines about the loss on whole logits and in chunks, and the size of a teacher cache."""
        k, rows = self.config.cache_k, self.setting.rows
        return [
            f"the loss on whole logits would take {gib(self.eager_logits(self.setting))}; in chunks it takes "
            f"{gib(self.loss_bytes(self.setting, rows)[0])}",
            f"a teacher cache of k = {k}: {distribution_bytes(k)} bytes per completion token, uncompressed",
        ]

    def known_changes(self) -> list[tuple[str, str, Any]]:
        """Return changes that may help, including a teacher cache."""
        known = super().known_changes()
        if self.setting.target is not None and not self.config.on_policy:
            known.append(("teacher_cache", "target", None))
        return known


class _Tokens:
    """A stand-in for a tokenizer with a token for each of a target's logits, which is all that a carved draft reads."""

    def __init__(self, target: PreTrainedModel):
        self.size: int = target.config.get_text_config().vocab_size

    def get_vocab(self) -> dict[str, int]:
        return {"": self.size - 1}


def trace_draft_loss(
    mode: Any,
    objective: Objective,
    sizes: ChunkSizes,
    k: int,
    draft: PreTrainedModel,
    target: PreTrainedModel | None,
    precision: Precision,
    positions: int,
) -> tuple[float, float]:
    """Return `trace_loss` for a draft; without a target, p comes from a cache of `k` tokens a position.

    The gradients to hidden states and head are part of both figures, the hidden states themselves of neither.
    """
    size, kept_D = common_vocabulary(draft, target), kept_tokens(draft.config)
    whole = head_of(draft if target is None else target)
    with mode:
        tokens_D = None if kept_D is None else torch.arange(size)  # which they are does not matter
        vocabulary = LossVocabulary.of(objective, tokens_D, len(whole.weight))
        hidden = _hidden(draft, positions, torch.float32 if precision == "autocast" else None).requires_grad_(True)
        follows, given = torch.zeros(positions, dtype=torch.bool), list[Tensor]()
        teacher: LiveDistributions | CachedDistributions
        if target is None:
            ids, log_p = torch.zeros(positions, k, dtype=torch.int32), torch.zeros(positions, k).half()
            teacher = CachedDistributions(ids, log_p, *torch.zeros(2, positions))
            given = [teacher.ids, teacher.log_p, teacher.log_tail]
        else:
            head = vocabulary.teacher_head(whole if tokens_D is not None else whole.cut(size))
            teacher = LiveDistributions(_hidden(target, positions), head)
            given = [*tensors_of(target), teacher.hidden]

        def loss(labels: Tensor, p: TeacherDistributions | None, sizes: ChunkSizes) -> tuple[Tensor, OutputHead]:
            own = head_of(draft)
            own = own.cut(size) if vocabulary.cut is None else vocabulary.cut.of_head(own)
            return chunked_objective(vocabulary.objective, hidden, own, p, labels, follows, sizes=sizes), own

    args = mode, draft, vocabulary, teacher, positions, precision, sizes, loss
    return trace_loss(*args, [*given, hidden, follows])


def common_vocabulary(*models: PreTrainedModel | None) -> int:
    """Return the number of tokens that all of these models have, or propose; None is no model."""
    given = [model for model in models if model is not None]
    kept = [kept_tokens(model.config) for model in given]
    return min(len(head_of(m).weight) if kept_D is None else len(kept_D) for m, kept_D in zip(given, kept, strict=True))


def _hidden(model: PreTrainedModel, positions: int, dtype: torch.dtype | None = None) -> Tensor:
    head = head_of(model).weight
    return torch.zeros(positions, head.shape[1], dtype=dtype or head.dtype)
