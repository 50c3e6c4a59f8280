"""Memory plans of heads on a target: the part that all kinds share."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.errors import at_most
from draftsmith.medusa.trainer import HeadsTrainer
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.losses.positions import LossPositions
from draftsmith.train.memory.activations import BatchShape, InPrecision
from draftsmith.train.memory.moments import Moment
from draftsmith.train.memory.setting import MemorySetting
from draftsmith.train.memory.training import TracedStep, TrainingPlan


class HeadsPlan(TrainingPlan):
    """Heads and their target."""

    label = "heads"
    part: ClassVar[str] = "heads"
    """The plural of the heads' unit of computation."""
    trainer_class: ClassVar[Any]

    @property
    def sees_embeddings(self) -> bool:
        """Whether the heads see the target's embeddings."""
        return True

    @abstractmethod
    def ends(self, drafter: Any) -> Sequence[nn.Module]:
        """Return the language-model heads."""

    def vocabulary(self, setting: MemorySetting) -> int:
        """Return the number of tokens that the heads draft among."""
        return int(self.drafter(setting).config.draft_vocab_size)

    def positions(self, rows: int, learns: bool = True) -> int:
        """Return the positions with a loss, if all tokens but each row's first belong to a completion."""
        return rows * max(self.batch.length - 2, 1)

    def trainer(self, step: TracedStep, **parts: Any) -> HeadsTrainer:
        """Return the run's trainer without data."""
        heads, target, config = self.drafter(step.setting), self.target(step.setting.target_dtype), self.config
        trainer: HeadsTrainer = self.trainer_class.without_data(**{
            "config": config, "heads": heads, "target": target, "target_ends": target,
            "embed": target.get_input_embeddings(), "count": self.count(heads), "vocab_size": heads.config.vocab_size,
            "sizes": self.sizes,
        } | parts)  # fmt: skip
        trainer.compare_over(config.objective, heads.token_map, heads.config.vocab_size)
        _ = trainer.teacher_head  # is part of `target_held`
        return trainer

    def count(self, heads: Any) -> int:
        """Return the number of guesses."""
        return self.trainer_class.guesses(heads, self.config)  # type: ignore[no-any-return]

    def inputs(self, step: TracedStep, rows: int) -> dict[str, Any]:
        """Return a batch of a number of rows; a cache has the target's states if its forward is not counted."""
        inputs = self.shape(step).labelled(rows, self.count(self.drafter(step.setting)), step.positions)
        if self.runs_target(step):
            return inputs
        weight = head_of(self.target(step.setting.target_dtype)).weight
        widths = {"hidden": weight.shape[1], "features": len(self.drafter(step.setting).layer_ids) * weight.shape[1]}
        size, dtype = inputs["input_ids"].shape, torch.int16 if weight.itemsize == 2 else torch.float32
        return inputs | {"teacher": {name: torch.zeros(*size, width, dtype=dtype) for name, width in widths.items()}}

    def runs_target(self, step: TracedStep) -> bool:
        """Return whether a traced step runs the target."""
        return step.setting.target is not None

    def shape(self, step: TracedStep) -> BatchShape:
        """Return the shape of a batch."""
        return self.batch

    def loss(self, step: TracedStep, rows: int, **seams: Any) -> Tensor:
        """Return the trainer's loss, or what its replay gets in place of the sums of chains."""
        trainer, inputs = self._trainers(step), self.inputs(step, rows)
        heads = InPrecision(self.drafter(step.setting), step.setting.precision)
        vars(trainer).update(seams, chain_sums=lambda *_: seams["checked_loss"](None, (torch.zeros(1), None)))
        if step.learns or step.positions is not None:
            return trainer.summed_loss(heads, inputs, LossPositions(inputs["positions"][0]))
        return trainer.replay_sums(heads, inputs, inputs["input_ids"][:, 1:] == 0)

    def moments(self, setting: MemorySetting) -> list[Moment]:
        """Return the times at which memory may peak."""
        steps, rows, part = self.step_bytes(setting), setting.rows, self.part
        losses, copies = self.loss_bytes(setting, rows), max(0.0, steps.in_loss.constant)
        activations, backbone = f"{part}: activations", self.backbone(setting)
        return [
            Moment("the target's forward", self.target_forward(setting)),
            Moment(
                f"the {part}' forward", backbone | {f"{activations}, and what the target left": steps.forward(rows)}
            ),
            Moment(
                "the losses",
                backbone
                | {
                    f"{part}: copies of weights for autocast": copies,
                    f"{activations}, and what the target left": steps.in_loss(rows) - copies,
                    "losses: logits of a chunk, gradients of head and states": losses[0],
                },
            ),
            Moment(
                "the losses' backward",
                backbone | {activations: steps.after_loss(rows), "losses: gradients of head and states": losses[1]},
            ),
            Moment(f"the {part}' backward", backbone | {f"{activations}, one layer's backward": steps.backward(rows)}),
            self.optimizer_step(setting),
        ]

    def backbone(self, setting: MemorySetting) -> dict[str, float]:
        """Return the activations of a target in training, which are held while the heads compute."""
        return {}

    def target_held(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes that the target takes at all times, and the copy of its head's rows of drafted tokens."""
        target = self.target(setting.target_dtype)
        if setting.target is None:  # a cache replaces its other weights
            embed: Any = target.get_input_embeddings()
            ends = [head_of(target).weight] + [embed.weight] * self.sees_embeddings
            size = sum({id(weight): weight.nbytes for weight in ends}.values())  # tied weights once
            held = {f"target: {'embeddings and ' * self.sees_embeddings}head": float(size)}
        else:
            held = super().target_held(setting)
        return held | self.copied_head(setting)

    def known_changes(self) -> list[tuple[str, str, Any]]:
        """Return changes that may help: also a cache of features in place of a frozen target."""
        cached = [("teacher_cache", "target", None)] * (self.setting.target is not None and not self.joint)
        return super().known_changes() + cached


class FeaturePlan(HeadsPlan):
    """Heads on features of a frozen target: in each step a forward of the target, one of the heads, and the losses.

    The target's last hidden states, embeddings and features of a batch live until the loss. The heads' forward leaves
    what their backward needs, with activation checkpointing little more than its inputs.
    """

    def __init__(self, config: Any):
        super().__init__(config)
        self.drafter(self.setting)  # refuses at once what the recipe refuses

    def layer_ids(self) -> Sequence[int]:
        """Return the layers whose features the heads see."""
        return list(self.drafter(self.setting).layer_ids)

    def runs_target(self, step: TracedStep) -> bool:
        """Return whether a traced step runs the target: only one that is traced whole."""
        return super().runs_target(step) and step == TracedStep(step.setting)

    def target_forward(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes of the target's forward with its features; empty if the target is elsewhere."""
        if setting.target in (None, "elsewhere"):
            return {}
        return {"target: activations, features": self.step_bytes(setting).teacher(setting.rows)}

    def moments(self, setting: MemorySetting) -> list[Moment]:
        """Return the times at which memory may peak, evaluations included."""
        moments = super().moments(setting)
        if rows := self.eval_rows:
            evaluation = replace(setting, rows=rows)
            replay = self.step_bytes(evaluation, False)
            # Its losses hold no more than those of training, which also have gradients.
            of_heads = max(replay.forward(rows), replay.in_loss(rows) + self.loss_bytes(setting, rows, False)[0])
            most = max(sum(self.target_forward(evaluation).values()), of_heads)
            moments.append(Moment("evaluation", {f"target, {self.part} and losses": most}))
        return moments

    def known_changes(self) -> list[tuple[str, str, Any]]:
        """Return changes that may help; a quantised layer cannot be copied."""
        changes = super().known_changes()
        if self.config.heads is not None or getattr(self.config, "init", "auto") in ("auto", "random"):
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
