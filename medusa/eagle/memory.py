"""What training EAGLE-3 heads holds in GPU memory: a forward of the target, and K steps with what their backward needs.

Of a batch there are the target's last hidden states, its embeddings and the features of some depths, until the loss is
taken. Of the K steps there is what the backward needs of each, or with activation checkpointing little more than what
goes into them. The losses are taken in chunks.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import decoder_layers
from draftsmith.decode.cache.kernels import computing_dtype
from draftsmith.decode.errors import at_most
from draftsmith.medusa.eagle.config import EaglePlanConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.initial import new_heads
from draftsmith.medusa.eagle.unrolled import Seen, seen_by, states_of_steps, work_of_steps
from draftsmith.train.job.flops import Work
from draftsmith.train.losses.output_head import head_of, last_hidden
from draftsmith.train.memory.activations import (
    Activations,
    Affine,
    BatchShape,
    LiveBytes,
    StandInLoss,
    hold_gradients,
    precision_of,
    shadow,
    tensors_of,
)
from draftsmith.train.memory.heads import HeadsPlan, trace_losses
from draftsmith.train.memory.moments import Moment
from draftsmith.train.memory.setting import MemorySetting, Precision
from draftsmith.train.memory.states import Weights


class StepBytes(NamedTuple):
    """Bytes of the K steps of a batch, by its rows; what the target left of it is counted as long as it is there."""

    forward: Affine
    """The most while the steps are computed, with gradients."""
    activations: Activations
    evaluated: Affine
    """The most while they are computed without."""


class EaglePlan(HeadsPlan):
    """EAGLE-3 heads on a frozen target."""

    def __init__(self, config: EaglePlanConfig):
        super().__init__(config)
        self.eval_rows = 0
        if config.training.eval_strategy != "no":
            self.eval_rows = int(config.training.per_device_eval_batch_size)
        self._looking = lru_cache(self._looked)
        self._steps = lru_cache(self._stepped)
        self.made(self.setting)  # what the recipe refuses is refused at once

    def _heads(self, lm_heads: str, half: bool) -> EagleHeads:
        config, target = self.config, self.bare_target(self.setting.target_dtype)
        count, vocab_size = config.draft_vocabulary, target.config.get_text_config().vocab_size
        if config.heads is not None:
            heads = EagleHeads.without_weights(config.heads)
        else:
            at_most(vocab_size).check("draft_vocabulary", count or vocab_size)
            if config.target_quantization:
                _quantise(decoder_layers(target)[-1])
            kept = None if count is None else torch.arange(count)
            with torch.device("meta"):
                heads = new_heads(config, target, kept)
        heads.check_fits(target)
        shadow(self.mode, heads.float().requires_grad_(True), half)
        return heads

    def lm_heads(self, heads: EagleHeads) -> Sequence[nn.Module]:
        """Return the language-model head."""
        return [heads.lm_head]

    def weights(self, heads: EagleHeads) -> Weights:
        """Count the heads' numbers. With one layer and one head FSDP gathers all of them."""
        whole, buffers = (sum(p.numel() for p in heads.parameters()), sum(b.nbytes for b in heads.buffers()))
        return Weights(whole, whole, buffers, 0, whole, heads.config.hidden_size**2)

    def vocabulary(self, heads: EagleHeads) -> int:
        """Return the tokens that the heads draft among."""
        return heads.config.draft_vocab_size

    def moments(self, setting: MemorySetting) -> list[Moment]:
        """Return the times at which memory may be at its most."""
        steps, rows = self._steps(replace(setting, rows=0, target=None)), setting.rows
        losses = self.loss_bytes(setting, self._places(rows))
        copies, p = max(0.0, steps.activations.in_loss.constant), self._teacher_bytes(setting, rows)
        kept = "steps: activations"
        moments = [
            Moment("the target's forward", self._target_forward(setting, rows)),
            Moment("the steps' forward", {f"{kept}, and what the target left": steps.forward(rows)}),
            Moment(
                "the losses",
                {
                    "steps: copies of weights for autocast": copies,
                    f"{kept}, and what the target left": steps.activations.in_loss(rows) - copies,
                    "p's hidden states": p,
                    "losses: logits of a chunk, gradients of head and states": losses[0],
                },
            ),
            Moment(
                "the losses' backward",
                {kept: steps.activations.kept(rows), "losses: gradients of head and states": losses[1]},
            ),
            Moment("the steps' backward", {f"{kept}, one step's backward": steps.activations.backward(rows)}),
            self.optimizer_step(setting),
        ]
        if rows := self.eval_rows:
            before = sum(self._target_forward(setting, rows).values())
            # What its losses hold is no more than in training, where gradients come to it.
            losses_alone = self.loss_bytes(setting, self._places(rows))[0] + self._teacher_bytes(setting, rows)
            most = max(before, steps.evaluated(rows) + losses_alone)
            moments.append(Moment("evaluation", {"target, steps and losses": most}))
        return moments

    def _places(self, rows: int) -> int:
        """Return the places that are learned at, where all tokens but each row's first are a completion's."""
        return rows * max(self.batch.length - 2, 1)

    def _teacher_bytes(self, setting: MemorySetting, rows: int) -> float:
        weight = head_of(self.target(setting.target_dtype)).weight
        return float(self.config.objective.needs_target * self._places(rows) * weight[0].nbytes)

    def _target_forward(self, setting: MemorySetting, rows: int) -> dict[str, float]:
        if setting.target in (None, "elsewhere"):
            return {}
        return {"target: activations, features": self._looking(setting.target_dtype)(rows)}

    def _looked(self, dtype: str) -> Affine:
        return trace_seen(self.mode, self.target(dtype), self.made(self.setting).layer_ids, self.batch)

    def _stepped(self, setting: MemorySetting) -> StepBytes:
        heads, target = self.made(setting), self.target(setting.target_dtype)
        steps = self.config.num_steps
        return trace_steps(self.mode, heads, target, steps, self.batch, setting.precision, setting.checkpointing)

    def traced_losses(self, setting: MemorySetting, positions: int) -> tuple[float, float]:
        """Return `trace_losses` at so many positions, without the states, which are counted with the steps."""
        heads, target, steps = self.made(setting), self.target(setting.target_dtype), self.config.num_steps
        with self.mode, precision_of(setting.precision):
            dtype, size = computing_dtype(heads.lm_head.weight), heads.config.hidden_size
            states = [torch.zeros(positions, size, dtype=dtype) for _ in range(steps)]
        learned = [state.requires_grad_(True) for state in states]
        args = heads, target, self.config.objective, lambda _: learned, lambda _: heads.head, positions
        return trace_losses(self.mode, *args, setting.precision, self.sizes, learned)

    def work(self, setting: MemorySetting) -> Work:
        """Return the arithmetic of the K steps."""
        return work_of_steps(self.made(setting), self.config.num_steps)

    def note(self, setting: MemorySetting) -> str:
        """Say what is trained."""
        shape = self.made(setting).config
        depths = ", ".join(map(str, shape.eagle_aux_hidden_state_layer_ids))
        tokens = f"{shape.draft_vocab_size:,} of {shape.vocab_size:,} tokens"
        return f"{self.config.num_steps} steps of one layer, features after layers {depths}, drafts among {tokens}"

    def own_changes(self) -> list[tuple[str, dict[str, Any]]]:
        """Return what may be changed of these heads."""
        now = self.setting
        known: list[tuple[str, dict[str, Any]]] = []
        if not now.checkpointing:
            known.append(("training.activation_checkpointing true", {"checkpointing": True}))
        if now.target_dtype in ("float32", "float64") and now.target is not None:
            known.append(("target_dtype bfloat16", {"target_dtype": "bfloat16"}))
        if now.target == "whole":
            # A quantised layer is no beginning for the heads'.
            begin = ", init random" if self.config.heads is None and self.config.init == "last_layer" else ""
            known += [(f"target_quantization {bits}{begin}", {"target": bits}) for bits in ("8bit", "4bit")]
        if now.target is not None:
            known.append(("teacher_cache", {"target": None}))
        return known


def _quantise(layer: nn.Module) -> None:
    """Give a layer's linear maps codes for weights, as loading in 8 or 4 bits does: no heads can begin as these."""
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.to(torch.uint8), requires_grad=False)


def trace_seen(mode: Any, target: PreTrainedModel, depths: Sequence[int], batch: BatchShape) -> Affine:
    """Return the most bytes that the target's forward takes at any time, with what it leaves for the heads.

    Args:
        mode: that the target was built in.
        target: in its own dtype.
        depths: after how many layers features are taken.
        batch: what it is fed.
    """

    def trace(rows: int) -> list[int]:
        with mode, torch.no_grad():
            inputs = batch.inputs(rows)
            with LiveBytes([*tensors_of(target), *inputs.values()]) as live:
                seen_by(target.eval(), depths, lambda: last_hidden(target, **inputs))
        return [live.peak]

    return batch.affine(trace)[0]


def trace_steps(
    mode: Any,
    heads: EagleHeads,
    target: PreTrainedModel,
    num_steps: int,
    batch: BatchShape,
    precision: Precision,
    checkpointing: bool,
) -> StepBytes:
    """Return what the K steps of a batch hold, by running their forward and backward.

    Args:
        mode: that heads and target were built in.
        heads: in half precision for "half".
        target: whose dtype embeddings and features have.
        num_steps: K.
        batch: what the target is fed.
        precision: how the heads compute.
        checkpointing: compute each step anew in the backward.
    """

    def states(rows: int) -> Sequence[Tensor]:
        """Return the states of all steps; what the target left is there while the caller has it."""
        position_ids, length = batch.inputs(rows).get("position_ids"), batch.length
        places = torch.zeros(rows * max(length - 2, 1), dtype=torch.long)
        return states_of_steps(heads, seen[0], position_ids, places, num_steps)

    seen: list[Seen] = []

    def look(rows: int) -> None:
        of_target = head_of(target).weight
        wide, depths = of_target.shape[1], len(heads.layer_ids)
        shapes = (rows, batch.length, wide), (rows, batch.length, wide), (rows, batch.length, depths * wide)
        seen[:] = [Seen(*(torch.zeros(shape, dtype=of_target.dtype) for shape in shapes))]

    def trace(rows: int) -> list[int]:
        with mode:
            if checkpointing:
                heads.activation_checkpointing_enable({"use_reentrant": False})
            hold_gradients(heads.train())
            with LiveBytes(tensors_of(heads)) as live:
                with precision_of(precision):
                    look(rows)
                    made = states(rows)
                    forward, in_loss = live.peak, live.now
                    total = StandInLoss.apply(*made)
                    del made
                    seen.clear()
                kept = live.now
                live.restart()
                total.backward()
            backward = live.peak
            heads.activation_checkpointing_disable()
            heads.zero_grad()
            with LiveBytes(tensors_of(heads.eval())) as live, precision_of(precision), torch.no_grad():
                look(rows)
                states(rows)
                seen.clear()
        return [forward, in_loss, kept, backward, live.peak]

    forward, in_loss, kept, backward, evaluated = batch.affine(trace)
    return StepBytes(forward, Activations(in_loss, kept, backward), evaluated)
