"""The memory plan of a training run of EAGLE-3 heads: a forward of the target, and K steps.

Of a batch there are the target's last hidden states, its embeddings and the features of some depths, until the loss is
taken. Of the K steps there is what the backward needs of each, or with activation checkpointing little more than what
goes into them. The losses are taken in chunks.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import decoder_layers
from draftsmith.decode.cache.kernels import computing_dtype
from draftsmith.decode.errors import at_most
from draftsmith.medusa.eagle.config import EaglePlanConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.initial import new_heads
from draftsmith.medusa.eagle.unrolled import states_of_steps, work_of_steps
from draftsmith.medusa.memory import HeadsPlan, trace_losses
from draftsmith.medusa.seen import TargetStates, seen_by
from draftsmith.train.job.flops import Work
from draftsmith.train.losses.output_head import head_of, last_hidden
from draftsmith.train.memory.activations import (
    Activations,
    BatchShape,
    Forward,
    precision_of,
)
from draftsmith.train.memory.moments import Moment
from draftsmith.train.memory.setting import MemorySetting, Precision


class EaglePlan(HeadsPlan):
    """EAGLE-3 heads on a frozen target."""

    def __init__(self, config: EaglePlanConfig):
        super().__init__(config)
        self._forward_of_steps = lru_cache(self._forward)
        self.drafter(self.setting)  # what the recipe refuses is refused at once

    def build(self, lm_heads: str) -> EagleHeads:
        """Return the heads that the run begins with."""
        config, target = self.config, self.empty_target(self.setting.target_dtype)
        count, vocab_size = config.draft_vocabulary, target.config.get_text_config().vocab_size
        if config.heads is not None:
            heads = EagleHeads.without_weights(config.heads)
        else:
            at_most(vocab_size).check("draft_vocabulary", count or vocab_size)
            if config.target_quantization:
                _quantise(decoder_layers(target)[-1])
            heads = new_heads(config, target, None if count is None else torch.arange(count, device="cpu"))
        heads.check_fits(target)
        return heads.float().requires_grad_(True)

    def ends(self, drafter: EagleHeads) -> Sequence[nn.Module]:
        """Return the language-model head."""
        return [drafter.lm_head]

    def vocabulary(self, heads: EagleHeads) -> int:
        """Return the tokens that the heads draft among."""
        return heads.config.draft_vocab_size

    def moments(self, setting: MemorySetting) -> list[Moment]:
        """Return the times at which memory may be at its most."""
        steps, rows = self.steps(setting), setting.rows
        losses = self.loss_bytes(setting, self._places(rows))
        copies, p = max(0.0, steps.in_loss.constant), self._teacher_bytes(setting, rows)
        activations = "steps: activations"
        moments = [
            Moment("the target's forward", self.target_forward(setting)),
            Moment("the steps' forward", {f"{activations}, and what the target left": steps.forward(rows)}),
            Moment(
                "the losses",
                {
                    "steps: copies of weights for autocast": copies,
                    f"{activations}, and what the target left": steps.in_loss(rows) - copies,
                    "p's hidden states": p,
                    "losses: logits of a chunk, gradients of head and states": losses[0],
                },
            ),
            Moment(
                "the losses' backward",
                {activations: steps.after_loss(rows), "losses: gradients of head and states": losses[1]},
            ),
            Moment("the steps' backward", {f"{activations}, one step's backward": steps.backward(rows)}),
            self.optimizer_step(setting),
        ]
        if rows := self.eval_rows:
            forward = self._forward_of_steps(setting.target_dtype)
            evaluated = self.forward_bytes(self.drafter(setting), self.batch, setting.precision, forward)(rows)
            before = sum(self.target_forward(replace(setting, rows=rows)).values())
            # Its losses hold no more than those of training, which have gradients besides.
            losses_alone = self.loss_bytes(setting, self._places(rows))[0] + self._teacher_bytes(setting, rows)
            moments.append(Moment("evaluation", {"target, steps and losses": max(before, evaluated + losses_alone)}))
        return moments

    def _places(self, rows: int) -> int:
        """Return the places with a loss, where all tokens but each row's first are a completion's."""
        return rows * max(self.batch.length - 2, 1)

    def _teacher_bytes(self, setting: MemorySetting, rows: int) -> float:
        weight = head_of(self.target(setting.target_dtype)).weight
        return float(self.config.objective.needs_target * self._places(rows) * weight[0].nbytes)

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
        """Return the bytes of the K steps of a batch; what the target left of it is there until the loss is taken."""
        forward = self._forward_of_steps(setting.target_dtype)
        return self.step_bytes(self.drafter(setting), self.batch, setting.precision, setting.checkpointing, forward)

    def _forward(self, dtype: str) -> Forward:
        return forward_of_steps(self.target(dtype), self.config.num_steps, self.batch)

    def traced_losses(
        self, heads: EagleHeads, target: PreTrainedModel, precision: Precision, positions: int
    ) -> tuple[float, float]:
        """Return `trace_losses` at a number of positions, without the states, which are counted with the steps."""
        with self.mode, precision_of(precision):
            dtype, size = computing_dtype(heads.lm_head.weight), heads.config.hidden_size
            states = [torch.zeros(positions, size, dtype=dtype) for _ in range(self.config.num_steps)]
        for state in states:
            state.requires_grad_(True)
        args = heads, target, self.config.objective, lambda _: states, lambda _: heads.head, positions
        return trace_losses(self.mode, *args, precision, self.sizes, given=states)

    def work(self, setting: MemorySetting) -> Work:
        """Return the arithmetic of the K steps."""
        return work_of_steps(self.drafter(setting), self.config.num_steps)

    def notes(self) -> list[str]:
        """Return what is trained."""
        shape = self.drafter(self.setting).config
        depths = ", ".join(map(str, shape.eagle_aux_hidden_state_layer_ids))
        tokens = f"{shape.draft_vocab_size:,} of {shape.vocab_size:,} tokens"
        return [f"{self.config.num_steps} steps of one layer, features after layers {depths}, drafts among {tokens}"]

    def known_changes(self) -> list[tuple[str, str, Any]]:
        """Add a cache of features; a quantised layer is no beginning for the heads'."""
        config, known = self.config, super().known_changes()
        if config.heads is None and config.init == "last_layer":
            begin = {"8bit": ", init random", "4bit": ", init random"}
            known = [(name + begin.get(value, ""), field, value) for name, field, value in known]
        return known + [("teacher_cache", "target", None)] * (self.setting.target is not None)


def _quantise(layer: nn.Module) -> None:
    """Give a layer's linear maps codes for weights, as loading in 8 or 4 bits does: no heads can begin as these."""
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.to(torch.uint8), requires_grad=False)


def forward_of_steps(target: PreTrainedModel, num_steps: int, batch: BatchShape) -> Forward:
    """Return a forward of K steps, over what the target left of a batch, for `trace_step` and `trace_forward`.

    Args:
        target: whose dtype embeddings and features have.
        num_steps: K.
        batch: what the target is fed.
    """

    def forward(heads: EagleHeads, inputs: dict[str, Tensor]) -> tuple[Sequence[Tensor], TargetStates]:
        of_target, rows, length = head_of(target).weight, len(inputs["input_ids"]), batch.length
        wide, depths = of_target.shape[1], len(heads.layer_ids)
        shapes = (rows, length, wide), (rows, length, wide), (rows, length, depths * wide)
        seen = TargetStates(*(torch.zeros(shape, dtype=of_target.dtype) for shape in shapes))
        position_ids = batch.inputs(rows).get("position_ids")
        places = torch.zeros(rows * max(length - 2, 1), dtype=torch.long)
        return states_of_steps(heads, seen, position_ids, places, num_steps), seen

    return forward
