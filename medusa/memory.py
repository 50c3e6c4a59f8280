"""Memory plans of heads on a target: what those of all kinds share."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import decoder_layers
from draftsmith.decode.errors import at_most
from draftsmith.medusa.seen import TargetStates, seen_by
from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.chunked import chunked_objectives
from draftsmith.train.losses.cut_vocabulary import CutVocabulary
from draftsmith.train.losses.distributions import LiveDistributions, TeacherDistributions
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead, head_of, last_hidden
from draftsmith.train.memory.activations import (
    Activations,
    Forward,
    hold_gradients,
    tensors_of,
    through_chunks,
    trace_loss,
)
from draftsmith.train.memory.moments import Moment
from draftsmith.train.memory.setting import MemorySetting, Precision
from draftsmith.train.memory.training import TrainingPlan

StatesOf = Callable[[Tensor], Sequence[Tensor]]
"""From the target's hidden states at the places to learn at, (N, H), to what each guess's head sees, (N, H) each."""


class HeadsPlan(TrainingPlan):
    """Heads and their target."""

    label = "heads"

    def __init__(self, config: Any):
        super().__init__(config)
        self._losses = lru_cache(self.traced_losses)

    @abstractmethod
    def ends(self, drafter: Any) -> Sequence[nn.Module]:
        """Return the language-model heads."""

    @abstractmethod
    def vocabulary(self, heads: Any) -> int:
        """Return the tokens that the heads draft among."""

    @abstractmethod
    def traced_losses(
        self, heads: Any, target: PreTrainedModel, precision: Precision, positions: int
    ) -> tuple[float, float]:
        """Return `trace_losses` at a number of positions."""

    def target_held(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes that the target takes at all times, and those rows of its head that are drafted among."""
        target = self.target(setting.target_dtype)
        if setting.target is None:  # a cache has what the others of its weights gave
            embed: Any = target.get_input_embeddings()
            ends = {id(weight): weight.nbytes for weight in (embed.weight, head_of(target).weight)}
            held = {"target: embeddings and head": float(sum(ends.values()))}
        else:
            held = super().target_held(setting)
        size, rows = self.vocabulary(self.drafter(setting)), head_of(target).weight
        copied = size < len(rows) and not replace(self.config.objective, partial=True).looks_outside
        return held | {"target: the head of the tokens that are drafted": rows[0].nbytes * size * copied}

    def loss_bytes(self, setting: MemorySetting, positions: int) -> tuple[float, float]:
        """Return `trace_losses`: beyond eight chunks through four and eight of them."""
        heads, target = self.drafter(setting), self.target(setting.target_dtype)
        few = 4 * max(1, self.sizes.chunk // self.vocabulary(heads))
        traced = partial(self._losses, heads, target, setting.precision)
        return through_chunks(traced, positions, few, 2 * few, whole=2 * few)


class FeaturePlan(HeadsPlan):
    """Heads on features of a frozen target, which are computed in each step: a forward of each, and the losses.

    Of a batch there are the target's last hidden states, its embeddings and its features until the loss is taken. Of
    the heads' forward there is what their backward needs, or with activation checkpointing little more than what goes
    into it. The losses are taken in chunks.
    """

    part: ClassVar[str]
    """What the heads compute."""

    def __init__(self, config: Any):
        super().__init__(config)
        self._forwards = lru_cache(self.forward)
        self.drafter(self.setting)  # what the recipe refuses is refused at once

    @abstractmethod
    def forward(self, dtype: str) -> Forward:
        """Return the heads' forward over what a target of this dtype left of a batch."""

    @abstractmethod
    def places(self, rows: int) -> int:
        """Return how many places of a batch have a loss, for each guess that has one of its own."""

    def evaluated(self, setting: MemorySetting) -> float:
        """Return the bytes of the heads' forward in an evaluation."""
        forward = self._forwards(setting.target_dtype)
        return self.forward_bytes(self.drafter(setting), self.batch, setting.precision, forward)(setting.rows)

    def moments(self, setting: MemorySetting) -> list[Moment]:
        """Return the times at which memory may be at its most."""
        steps, rows, part = self.steps(setting), setting.rows, self.part
        losses = self.loss_bytes(setting, self.places(rows))
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
            # Its losses hold no more than those of training, which have gradients besides.
            losses_alone = self.loss_bytes(setting, self.places(rows))[0] + self._teacher_bytes(setting, rows)
            most = max(before, self.evaluated(evaluation) + losses_alone)
            moments.append(Moment("evaluation", {f"target, {part} and losses": most}))
        return moments

    def _teacher_bytes(self, setting: MemorySetting, rows: int) -> float:
        weight = head_of(self.target(setting.target_dtype)).weight
        return float(self.config.objective.needs_target * self.places(rows) * weight[0].nbytes)

    def target_forward(self, setting: MemorySetting) -> dict[str, float]:
        """Return what the target's forward takes with its features; nothing here where the target is elsewhere."""
        if setting.target in (None, "elsewhere"):
            return {}
        forward = self.forward_bytes(self.target(setting.target_dtype), self.batch, "float32", self._look)
        return {"target: activations, features": forward(setting.rows)}

    def _look(self, target: PreTrainedModel, inputs: dict[str, Tensor]) -> tuple[TargetStates, None]:
        depths = self.drafter(self.setting).layer_ids
        return seen_by(target, depths, lambda: last_hidden(target, **inputs)), None

    def steps(self, setting: MemorySetting) -> Activations:
        """Return the bytes of the heads' forward; what the target left of a batch is there until the loss is taken."""
        forward = self._forwards(setting.target_dtype)
        return self.step_bytes(self.drafter(setting), self.batch, setting.precision, setting.checkpointing, forward)

    def made(self, config: Any, heads_class: Any, new: Callable[[PreTrainedModel, Tensor | None], Any]) -> Any:
        """Return the heads that a run begins with, without data: given ones, or new ones on tokens of a number.

        Args:
            config: of the run.
            heads_class: of given heads.
            new: makes them for a target and the tokens that they draft among, all if None.
        """
        target = self.empty_target(self.setting.target_dtype)
        count, vocab_size = config.draft_vocabulary, target.config.get_text_config().vocab_size
        if config.heads is not None:
            heads = heads_class.without_weights(config.heads)
        else:
            at_most(vocab_size).check("draft_vocabulary", count or vocab_size)
            if config.target_quantization:
                quantise(decoder_layers(target)[-1])
            heads = new(target, None if count is None else torch.arange(count, device="cpu"))
        heads.check_fits(target)
        return heads.float().requires_grad_(True)


def quantise(layer: nn.Module) -> None:
    """Give a layer's linear maps codes for weights, as loading in 8 or 4 bits does: no heads can begin as these."""
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.to(torch.uint8), requires_grad=False)


def left_of(target: PreTrainedModel, depths: int, rows: int, length: int) -> TargetStates:
    """Return zeros of the shapes of what a target leaves of a batch.

    Args:
        target: whose dtype they have.
        depths: how many of its layers' outputs are seen.
        rows: of the batch.
        length: of a row.
    """
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
    """Return the most bytes that the losses of all guesses take in the forward, and in their own backward.

    Args:
        mode: that heads and target were built in.
        heads: with `requires_grad` where they train.
        target: in its own dtype.
        objective: what each guess minimises.
        states_of: what it takes is counted.
        head: of each guess.
        positions: at which each guess learns.
        precision: how heads compute.
        sizes: of chunks.
        given: what is not counted.
    """
    with mode:
        of_target, tokens_D = head_of(target), heads.token_map
        hidden = torch.zeros(positions, of_target.weight.shape[1], dtype=of_target.weight.dtype)
        labels, objective = torch.zeros(positions, dtype=torch.long), replace(objective, partial=tokens_D is not None)
        cut = None if tokens_D is None else CutVocabulary(tokens_D, heads.config.vocab_size)
        teacher_head = of_target if cut is None else cut.teacher_head(of_target, objective)
        sizes = sizes if cut is None else cut.training_sizes(sizes, objective)

        def losses() -> tuple[Tensor, Any]:
            teacher: TeacherDistributions | None = None
            if objective.needs_target:
                live_p = LiveDistributions(hidden, teacher_head)
                teacher = live_p if cut is None else cut.of_teacher(live_p, objective)
            learners = [(state, head(k), torch.ones(positions), 1.0) for k, state in enumerate(states_of(hidden))]
            return chunked_objectives(objective, labels, learners, teacher, sizes), (learners, teacher)

        hold_gradients(heads)
        given = [*given, *tensors_of(heads), *tensors_of(target), hidden, labels, teacher_head.weight]
        found = trace_loss(given, losses, precision)
        for parameter in heads.parameters():
            parameter.grad = None
    return found
