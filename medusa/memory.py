"""Memory plans of heads on a target: the part that all kinds share."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.errors import at_most
from draftsmith.medusa.target_states import TargetStates, run_for_states
from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.chunked import chunked_objectives
from draftsmith.train.losses.cut_vocabulary import LossVocabulary
from draftsmith.train.losses.distributions import LiveDistributions, TeacherDistributions
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead, head_of, last_hidden
from draftsmith.train.memory.activations import (
    Activations,
    Forward,
    precision_of,
    tensors_of,
    through_chunks,
    trace_loss,
)
from draftsmith.train.memory.moments import Moment
from draftsmith.train.memory.setting import MemorySetting, Precision
from draftsmith.train.memory.training import TrainingPlan

StatesOf = Callable[[Tensor], Sequence[Tensor]]
"""A function from the target's hidden states at the positions to learn at, (N, H), to each guess's states, (N, H)."""
Guesses = tuple[StatesOf, Callable[[int], OutputHead], Sequence[Tensor]]
"""The states and the head of each guess, and tensors that are there before the losses."""


class HeadsPlan(TrainingPlan):
    """Heads and their target."""

    label = "heads"

    def __init__(self, config: Any):
        super().__init__(config)
        self._losses = lru_cache(self.traced_losses)

    @abstractmethod
    def ends(self, drafter: Any) -> Sequence[nn.Module]:
        """Return the language-model heads."""

    def vocabulary(self, heads: Any) -> int:
        """Return the number of tokens that the heads draft among."""
        return int(heads.config.draft_vocab_size)

    @abstractmethod
    def guesses(self, heads: Any, target: PreTrainedModel, positions: int) -> Guesses:
        """Return the guesses that the losses learn from at a number of positions."""

    def traced_losses(
        self, heads: Any, target: PreTrainedModel, precision: Precision, positions: int
    ) -> tuple[float, float]:
        """Return `trace_losses` at a number of positions."""
        with self.mode, precision_of(precision):
            states_of, head, given = self.guesses(heads, target, positions)
        args = heads, target, self.config.objective, states_of, head, positions
        return trace_losses(self.mode, *args, precision, self.sizes, given)

    def target_held(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes that the target takes at all times, and the copy of its head's rows of drafted tokens."""
        target = self.target(setting.target_dtype)
        if setting.target is None:  # a cache replaces its other weights
            embed: Any = target.get_input_embeddings()
            ends = {id(weight): weight.nbytes for weight in (embed.weight, head_of(target).weight)}
            held = {"target: embeddings and head": float(sum(ends.values()))}
        else:
            held = super().target_held(setting)
        size, rows = self.vocabulary(self.drafter(setting)), head_of(target).weight
        copied = size < len(rows) and not replace(self.config.objective, partial=True).looks_outside
        return held | {"target: the head of the tokens that are drafted": rows[0].nbytes * size * copied}

    def loss_bytes(self, setting: MemorySetting, positions: int) -> tuple[float, float]:
        """Return `trace_losses`."""
        heads, target = self.drafter(setting), self.target(setting.target_dtype)
        chunk = max(1, self.sizes.chunk // self.vocabulary(heads))
        return through_chunks(partial(self._losses, heads, target, setting.precision), positions, chunk)


class FeaturePlan(HeadsPlan):
    """Heads on features of a frozen target: in each step a forward of the target, one of the heads, and the losses.

    The target's last hidden states, embeddings and features of a batch live until the loss. The heads' forward leaves
    what their backward needs, with activation checkpointing little more than its inputs.
    """

    part: ClassVar[str]
    """The plural of the heads' unit of computation."""

    def __init__(self, config: Any):
        super().__init__(config)
        self._forwards = lru_cache(self.forward)
        self.drafter(self.setting)  # refuses at once what the recipe refuses

    @abstractmethod
    def forward(self, dtype: str) -> Forward:
        """Return the heads' forward on the states of a target of this dtype."""

    @abstractmethod
    def positions(self, rows: int) -> int:
        """Return the number of positions of a batch with a loss."""

    def evaluated(self, setting: MemorySetting) -> float:
        """Return the bytes of the heads' forward in an evaluation."""
        forward = self._forwards(setting.target_dtype)
        return self.forward_bytes(self.drafter(setting), self.batch, setting.precision, forward)(setting.rows)

    def moments(self, setting: MemorySetting) -> list[Moment]:
        """Return the times at which memory may peak."""
        steps, rows, part = self.steps(setting), setting.rows, self.part
        losses = self.loss_bytes(setting, self.positions(rows))
        copies, p = max(0.0, steps.in_loss.constant), self._teacher_bytes(setting, rows)
        activations = f"{part}: activations"
        moments = [
            Moment("the target's forward", self.target_forward(setting)),
            Moment(f"the {part}' forward", {f"{activations}, and what the target left": steps.forward(rows)}),
            Moment(
                "the losses",
                {
                    f"{part}: copies of weights for autocast": copies,
                    f"{activations}, and what the target left": steps.in_loss(rows) - copies,
                    "p's hidden states": p,
                    "losses: logits of a chunk, gradients of head and states": losses[0],
                },
            ),
            Moment(
                "the losses' backward",
                {activations: steps.after_loss(rows), "losses: gradients of head and states": losses[1]},
            ),
            Moment(f"the {part}' backward", {f"{activations}, one layer's backward": steps.backward(rows)}),
            self.optimizer_step(setting),
        ]
        if rows := self.eval_rows:
            evaluation = replace(setting, rows=rows)
            before = sum(self.target_forward(evaluation).values())
            # Its losses hold no more than those of training, which also have gradients.
            losses_alone = self.loss_bytes(setting, self.positions(rows))[0] + self._teacher_bytes(setting, rows)
            most = max(before, self.evaluated(evaluation) + losses_alone)
            moments.append(Moment("evaluation", {f"target, {part} and losses": most}))
        return moments

    def _teacher_bytes(self, setting: MemorySetting, rows: int) -> float:
        weight = head_of(self.target(setting.target_dtype)).weight
        return float(self.config.objective.needs_target * self.positions(rows) * weight[0].nbytes)

    def target_forward(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes of the target's forward with its features; empty if the target is elsewhere."""
        if setting.target in (None, "elsewhere"):
            return {}
        forward = self.forward_bytes(self.target(setting.target_dtype), self.batch, "float32", self._look)
        return {"target: activations, features": forward(setting.rows)}

    def _look(self, target: PreTrainedModel, inputs: dict[str, Tensor]) -> tuple[TargetStates, None]:
        depths = self.drafter(self.setting).layer_ids
        return run_for_states(target, depths, lambda: last_hidden(target, **inputs)), None

    def steps(self, setting: MemorySetting) -> Activations:
        """Return the bytes of the heads' step, with the target's states until the loss."""
        forward = self._forwards(setting.target_dtype)
        return self.step_bytes(self.drafter(setting), self.batch, setting.precision, setting.checkpointing, forward)

    def known_changes(self) -> list[tuple[str, str, Any]]:
        """Return changes that may help; a quantised layer cannot be copied."""
        changes = super().known_changes()
        if self.config.heads is not None or self.config.init in ("auto", "random"):
            return changes
        begin = {"8bit": ", init random", "4bit": ", init random"}
        return [(name + begin.get(value, ""), field, value) for name, field, value in changes]

    def made(self, config: Any, heads_class: Any, new: Callable[[PreTrainedModel, Tensor | None], Any]) -> Any:
        """Return the run's initial heads without data: those of `config.heads`, or new ones.

        `new` makes them for a target and the tokens that they may draft, None for all.
        """
        target = self.empty_target(self.setting.target_dtype)
        count, vocab_size = config.draft_vocabulary, target.config.get_text_config().vocab_size
        if config.heads is not None:
            heads = heads_class.without_weights(config.heads)
        else:
            at_most(vocab_size).check("draft_vocabulary", count or vocab_size)
            heads = new(target, None if count is None else torch.arange(count, device="cpu"))
        heads.check_fits(target)
        return heads.float().requires_grad_(True)


def fake_target_states(target: PreTrainedModel, depths: int, rows: int, length: int) -> TargetStates:
    """Return zeros in the shapes and the dtype of a target's states of a batch, with features of `depths` layers."""
    weight = head_of(target).weight
    wide = weight.shape[1]
    shapes = (rows, length, wide), (rows, length, wide), (rows, length, depths * wide)
    return TargetStates(*(torch.zeros(shape, dtype=weight.dtype) for shape in shapes))


def trace_losses(
    mode: Any,
    heads: Any,
    target: PreTrainedModel,
    objective: Objective,
    states_of: StatesOf,
    head: Callable[[int], OutputHead],
    positions: int,
    precision: Precision,
    sizes: ChunkSizes,
    given: Sequence[Tensor] = (),
) -> tuple[float, float]:
    """Return `trace_loss` for the losses of all guesses, each learned at all `positions`.

    The results of `states_of` and `head` are counted, tensors `given` are not.
    """
    whole = head_of(target)
    with mode:
        hidden = torch.zeros(positions, whole.weight.shape[1], dtype=whole.weight.dtype)
        vocabulary = LossVocabulary.of(objective, heads.token_map, heads.config.vocab_size)
        teacher = LiveDistributions(hidden, vocabulary.teacher_head(whole))

    def losses(labels: Tensor, p: TeacherDistributions | None, sizes: ChunkSizes) -> tuple[Tensor, Any]:
        learners = [(state, head(k), torch.ones(positions), 1.0) for k, state in enumerate(states_of(hidden))]
        return chunked_objectives(vocabulary.objective, labels, learners, p, sizes), learners

    given = [*given, *tensors_of(target), hidden, teacher.head.weight]
    return trace_loss(mode, heads, vocabulary, teacher, positions, precision, sizes, losses, given)
