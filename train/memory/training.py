"""Memory plans of training runs, of any kind of drafter.

A kind names what it trains (`build`). Unless a step is one forward and one backward of that, the kind also counts what
a GPU holds at each moment of a step (`moments`).
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.train.job.flops import Work
from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.inside_forward import open_forward
from draftsmith.train.memory.activations import (
    Activations,
    InPrecision,
    precision_of,
    shadow,
    through_chunks,
    trace_loss,
    trace_step,
)
from draftsmith.train.memory.moments import Moment
from draftsmith.train.memory.plan import MemoryPlan
from draftsmith.train.memory.setting import GIB, ZERO, MemorySetting, gib, placement
from draftsmith.train.memory.states import Weights, held_bytes, optimizer_bytes, step_bytes, target_bytes
from draftsmith.train.models import DTYPES


class TracedStep(NamedTuple):
    """A step that is traced: of training or an evaluation, with all loss positions of its rows or another number."""

    setting: MemorySetting
    learns: bool = True
    positions: int | None = None


class TrainingPlan(MemoryPlan):
    """A target and a drafter without data, and the memory of a GPU that trains the drafter."""

    most_rows = 1024
    batch_name, row_name, dtype_field = "micro batch", "row", "target_dtype"
    label: ClassVar[str] = "drafter"
    """The drafter's name in the table."""

    def __init__(self, config: Any):
        training = config.training
        setting = MemorySetting(
            config.strategy or "ddp",
            bool(training.bf16 or training.fp16),
            bool(training.activation_checkpointing),
            config.target_dtype,
            None if config.teacher else placement(config),
            int(training.per_device_train_batch_size),
            getattr(config, "lm_heads", "own"),
        )
        super().__init__(config, setting, int(config.sequence_length or 0), config.packing)
        self.eval_rows = int(training.per_device_eval_batch_size) if training.eval_strategy != "no" else 0
        self.sizes = ChunkSizes.on_gpu(config.gpu_memory * GIB, config.loss_chunk)
        self._drafters, self._trainers = lru_cache(self._drafter), lru_cache(self._trainer)
        self._held = lru_cache(self._computed_held)
        self._steps, self._losses = lru_cache(self._traced_step), lru_cache(self._traced_loss)

    @abstractmethod
    def build(self, lm_heads: str) -> nn.Module:
        """Return the drafter in float32, with gradients where it trains; it is called inside the meta device."""

    def weights(self, drafter: Any) -> Weights:
        """Count the drafter's numbers; by default FSDP gathers them as one."""
        return Weights.of_module(drafter, self.target_shape.get_text_config().hidden_size)

    def ends(self, drafter: Any) -> Sequence[nn.Module]:
        """Return the embeddings and heads, whose matrices Muon does not train."""
        return ()

    def target_held(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes that the target takes at all times: none with a teacher cache or with servers."""
        if setting.target is None:
            return {}
        return target_bytes(self.target(setting.target_dtype), setting.target, self.config.gpus)

    def copied_head(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes of the copy of the target's head that the loss holds if it needs some of the rows alone."""
        trainer = self._trainers(TracedStep(setting.traced))
        copied = trainer.teacher_head is not trainer.target_head
        return {"target: the head of the tokens that are drafted": float(copied and trainer.teacher_head.weight.nbytes)}

    def trainer(self, step: TracedStep, **parts: Any) -> Any:
        """Return the run's trainer without data, whose loss is traced; None for `drafter(ids)` alone."""
        return None

    def loss(self, step: TracedStep, rows: int, **seams: Any) -> Tensor:
        """Return the trainer's loss of a number of rows: an `activations.Loss`."""
        logits = InPrecision(self.drafter(step.setting), step.setting.precision)(self.batch.inputs(rows)["input_ids"])
        return seams["checked_loss"](None, (logits, None))  # type: ignore[no-any-return]

    def positions(self, rows: int, learns: bool = True) -> int:
        """Return the positions of a batch with a loss, at most; by default all that have a next token."""
        return rows * (self.batch.length - 1)

    def vocabulary(self, setting: MemorySetting) -> int:
        """Return the number of tokens that the loss compares p and q over."""
        return int(self.target_shape.get_text_config().vocab_size)

    def moments(self, setting: MemorySetting) -> list[Moment]:
        """Return the times at which memory may peak; by default those of a forward and a backward of `drafter(ids)`."""
        step = self.step_bytes(setting)
        logits = setting.rows * self.batch.length * self.vocabulary(setting)
        chunk = 10.0 * 4 * min(logits, self.sizes.part)  # see `ChunkSizes`
        return [
            Moment("the target's forward", self.target_forward(setting)),
            Moment("the loss", {"activations": step.in_loss(setting.rows), "loss: logits of a chunk": chunk}),
            Moment("the backward", {"activations": step.backward(setting.rows)}),
            self.optimizer_step(setting),
        ]

    def work(self, setting: MemorySetting) -> Work:
        """Return the arithmetic of the drafter."""
        return Work.of_maps(self.drafter(setting))

    def drafter_operations(self, setting: MemorySetting) -> float | None:
        """Return the operations for a token to learn from, with checkpointing's second forward; None if not known."""
        work, seen = self.work(setting), self.batch.length / 2
        return work.step(1, seen, 1) + (work.forward(1, seen, 0) if setting.checkpointing else 0.0)

    def notes(self) -> list[str]:
        """Return lines about this kind of drafter to print after the table."""
        return []

    # The rest is the same for all kinds.

    @property
    def joint(self) -> bool:
        """Whether the target is trained too."""
        return bool(self.config.trains_target)

    def drafter(self, setting: MemorySetting) -> Any:
        """Return the drafter as it computes under a setting, without data."""
        return self._drafters(setting.precision == "half", setting.lm_heads)

    def _drafter(self, half: bool, lm_heads: str) -> nn.Module:
        with torch.device("meta"):
            drafter = self.build(lm_heads)
        shadow(self.mode, drafter, half)  # float16 takes the bytes of bfloat16
        # Losses run inside of the forwards of some of these.
        open_forward(drafter, *(module for module in drafter.modules() if isinstance(module, nn.Linear)))
        return drafter

    def step_bytes(self, setting: MemorySetting, learns: bool = True) -> Activations:
        """Return the bytes of a step of training or of an evaluation, without its loss."""
        return self._steps(TracedStep(setting.traced, learns))

    def _trainer(self, step: TracedStep) -> Any:
        self.target(step.setting.target_dtype), self.drafter(step.setting)  # outside of the mode
        with self.mode, precision_of(step.setting.precision):
            return self.trainer(step)

    def _traced_step(self, step: TracedStep) -> Activations:
        drafter, _ = self.drafter(step.setting), self._trainers(step)  # both are there before the step
        wanted = step.learns and step.setting.checkpointing
        checkpointing = wanted and bool(getattr(drafter, "supports_gradient_checkpointing", False))
        batch = self.batch if step.learns else replace(self.batch, rows=self.eval_rows)
        return trace_step(self.mode, drafter, batch, partial(self.loss, step), checkpointing, step.learns)

    def loss_bytes(self, setting: MemorySetting, rows: int, learns: bool = True) -> tuple[float, float]:
        """Return the bytes of the loss of a number of rows, and those of its own backward: see `trace_loss`."""
        key, chunk = replace(setting.traced, checkpointing=False), max(1, self.sizes.chunk // self.vocabulary(setting))
        traced = lambda positions: self._losses(TracedStep(key, learns, positions))  # noqa: E731
        return through_chunks(traced, self.positions(rows, learns), chunk)

    def _traced_loss(self, step: TracedStep) -> tuple[float, float]:
        drafter, _ = self.drafter(step.setting), self._trainers(step)
        return trace_loss(self.mode, drafter, partial(self.loss, step), step.learns)

    def _trained(self, setting: MemorySetting) -> list[nn.Module]:
        return [self.drafter(setting), *([self.target(setting.target_dtype)] if self.joint else [])]

    def trained_numbers(self, setting: MemorySetting) -> int:
        """Return the numbers that have gradients."""
        parameters = {id(p): p for module in self._trained(setting) for p in module.parameters() if p.requires_grad}
        return sum(parameter.numel() for parameter in parameters.values())

    def optimizer(self, setting: MemorySetting) -> str:
        """Return the optimiser, as `optimizer_bytes` names it."""
        optim = self.config.training.optim
        muon = self.config.uses_muon(sharded=setting.strategy != "ddp")
        return "muon" if muon else str(getattr(optim, "value", optim))

    def held(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes that a GPU holds at all times, by their use."""
        return self._held(replace(setting, rows=0))

    def _computed_held(self, setting: MemorySetting) -> dict[str, float]:
        drafter, trained = self.drafter(setting), self.trained_numbers(setting)
        weights = self.weights(drafter)
        weights = replace(weights, all=trained if self.joint else weights.all, trained=trained)
        name, ends = self.optimizer(setting), self.ends(drafter)
        states = sum(optimizer_bytes(module, name, ends) for module in self._trained(setting))
        label = "trained" if self.joint else self.label
        own = held_bytes(weights, states, setting.strategy, self.config.gpus, setting.precision, label)
        return self.target_held(setting) | own

    def optimizer_step(self, setting: MemorySetting) -> Moment:
        """Return the optimiser's step, which needs some bytes for a moment."""
        trained = self.trained_numbers(setting)
        size = step_bytes(self.optimizer(setting), trained, setting.strategy, self.config.gpus)
        return Moment("the optimiser's step", {"optimiser: temporary": size})

    def target_forward(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes of the target's forward; empty if the target is elsewhere."""
        if setting.target in (None, "elsewhere"):
            return {}
        forward = self.forward_bytes(self.target(setting.target_dtype), self.batch, "float32")
        return {"target: activations": forward(setting.rows)}

    def changes(self) -> Iterator[tuple[str, MemorySetting]]:
        """Yield changes that make a run fit: each one that is enough alone, or else several together.

        Cheap ones come first; a smaller micro batch with more accumulation is one of them.
        """
        now = self.setting
        known = self.known_changes()
        alone = [(name, replace(now, **{field: value})) for name, field, value in known]
        if rows := self.largest(now):
            alone.insert(0, (f"training.per_device_train_batch_size {rows}", replace(now, rows=rows)))
        fitting = [(name, setting) for name, setting in alone if self.fits(setting)]
        yield from fitting
        if fitting:
            return
        together, names = now, dict[str, str]()
        for name, field, value in known:
            together = replace(together, **{field: value})
            names[field] = name  # the last strategy counts, and the last place of the target
            if rows := min(now.rows, self.largest(together)):
                if rows < now.rows:
                    names["rows"] = f"training.per_device_train_batch_size {rows}"
                yield ", ".join(names.values()), replace(together, rows=rows)
                return

    def known_changes(self) -> list[tuple[str, str, Any]]:
        """Return possible changes: the user's words for each, the field of the setting, and its value."""
        now, config = self.setting, self.config
        known: list[tuple[str, str, Any]] = []
        if not now.checkpointing:
            known.append(("training.activation_checkpointing true", "checkpointing", True))
        if not now.half:
            known.append(("training.bf16 true", "half", True))
        if now.target_dtype in ("float32", "float64") and now.target is not None:
            known.append(("target_dtype bfloat16", "target_dtype", "bfloat16"))
        if config.gpus > 1 and config.optimizer != "muon" and now.strategy in ZERO:
            stronger = ZERO[ZERO.index(now.strategy) + 1 :]
            known += [(f"strategy {strategy}", "strategy", strategy) for strategy in stronger]
        if now.target == "whole":
            if config.gpus > 1 and not self.joint:
                known.append(("target_sharded true", "target", "sharded"))
            known += [(f"target_quantization {bits}", "target", bits) for bits in ("8bit", "4bit")]
        return known

    def facts(self) -> list[str]:
        """Return the other moments, the notes of the kind of drafter, and the size of a step."""
        setting, config = self.setting, self.config
        peak, accumulation = self.peak(setting).name, int(config.training.gradient_accumulation_steps)
        others = [f"{m.name} {gib(m.total)}" for m in self.moments(setting) if m.name != peak and m.total]
        samples = setting.rows * accumulation * config.gpus
        return [
            "other moments: " + ", ".join(others),
            *self.notes(),
            f"a step: {setting.rows} rows × {accumulation} accumulated × {config.gpus} GPUs = {samples} samples, at "
            f"most {samples * self.batch.length:,} tokens",
            *([self._states()] if config.teacher else []),
        ]

    def _states(self) -> str:
        """Return a line about the states that servers send, of layers as vLLM counts them."""
        text = self.target_shape.get_text_config()
        depths = [*sorted({*self.layer_ids()} - {text.num_hidden_layers}), f"{text.num_hidden_layers} (the last)"]
        size, dtype = len(depths) * text.hidden_size, self.setting.target_dtype
        words = f"after layers {', '.join(map(str, depths))}, in {dtype}"
        return f"states from servers: {size * DTYPES[dtype].itemsize:,} bytes a token, {words}"

    def remarks(self) -> list[str]:
        """Return a line about what is not counted."""
        if self.setting.target != "elsewhere":
            return []
        cached = "in a cache" if self.config.teacher_cache else f"on {self.config.target_device}"
        place = "on servers" if self.config.teacher else cached
        return [f"of the target, {place}, the head alone is counted"]

    def advice(self) -> list[str]:
        """Return changes that would make a run fit, a line each."""
        reserve = self.config.reserve * GIB
        changes = [f"{name}: {gib(self.total(change) + reserve)} GiB" for name, change in self.changes()]
        return changes or ["no change of this plan's makes it fit: shorter samples, or a smaller pair"]

    def layer_ids(self) -> Sequence[int]:
        """Return the layers after which the drafter reads the target's states, the last one apart; by default none."""
        return ()

    def trained_rate(self) -> float | None:
        """Return the tokens a second that all GPUs learn from by their arithmetic; None if a model's is not known."""
        drafter, target = self.drafter_operations(self.setting), self._target_operations()
        if drafter is None or target is None:
            return None
        return self.speed() * int(self.config.gpus) / (target + drafter)

    def hours(self) -> float | None:
        """Return the hours of `tokens` tokens by arithmetic; None if a model's is not known."""
        rate = self.trained_rate()
        if rate is None:
            return None
        return float(self.config.tokens / rate / 3600)

    def _target_operations(self) -> float | None:
        setting = self.setting
        if setting.target is None:
            return 0.0
        work = Work.of(self.target(setting.target_dtype))
        if work is None:
            return None
        return 0.0 if setting.target == "elsewhere" else work.forward(1, self.batch.length / 2, 1)

    def host_bytes(self) -> dict[str, float]:
        """Return the host's memory with the models that its processes load."""
        setting, processes = self.setting, self.processes
        numbers = sum(parameter.numel() for parameter in self.drafter(setting).parameters())
        parts = super().host_bytes() | {"what is trained, in float32, a copy per process": 4.0 * numbers * processes}
        if setting.target is None:
            return parts
        target = self.target(setting.target_dtype)
        whole = float(sum(p.numel() * p.element_size() for p in target.parameters()))
        if setting.target == "sharded":
            parts["the target, in the first process of all"] = whole
        elif self.joint and setting.target == "whole":
            parts["the target, a copy per process until it is wrapped"] = whole * processes
        return parts

    def title(self) -> str:
        """Return a line with machines, strategy and precision."""
        config, setting = self.config, self.setting
        checkpointing = "activation checkpointing" if setting.checkpointing else "no activation checkpointing"
        spread = f"{config.gpus} × {config.gpu_memory:g} GiB, {setting.strategy}, {setting.precision}"
        return f"{spread}, {checkpointing}"
