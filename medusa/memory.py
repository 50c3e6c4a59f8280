"""Memory plans of heads on a target: what those of all kinds share."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.chunked import chunked_objectives
from draftsmith.train.losses.cut_vocabulary import CutVocabulary
from draftsmith.train.losses.distributions import LiveDistributions, TeacherDistributions
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead, head_of
from draftsmith.train.memory.activations import hold_gradients, tensors_of, through_chunks, trace_loss
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
