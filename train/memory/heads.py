"""What training heads holds in GPU memory, as plans of Medusa and of EAGLE-3 heads share it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from draftsmith.train.job.flops import Work
from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.chunked import chunked_objectives
from draftsmith.train.losses.cut_vocabulary import CutVocabulary
from draftsmith.train.losses.distributions import LiveDistributions, TeacherDistributions
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead, head_of
from draftsmith.train.memory.activations import (
    Affine,
    BatchShape,
    LiveBytes,
    hold_gradients,
    precision_of,
    shadow,
    tensors_of,
    trace_draft,
    trace_forward,
)
from draftsmith.train.memory.moments import Moment
from draftsmith.train.memory.plan import DROPOUT, read_config
from draftsmith.train.memory.setting import GIB, ZERO, MemorySetting, Precision, placement
from draftsmith.train.memory.states import (
    Weights,
    held_bytes,
    optimizer_bytes,
    step_bytes,
    target_bytes,
)
from draftsmith.train.models import DTYPES, empty_model, stored_dtype

StatesOf = Callable[[Tensor], Sequence[Tensor]]
"""From the target's hidden states at the places to learn at, (N, H), to what each guess's head sees, (N, H) each."""


class HeadsPlan(ABC):
    """Heads and their target without data, and what training them would hold."""

    def __init__(self, config: Any):
        self.config = config
        self.mode = FakeTensorMode()
        training = config.training
        self._target_config: Any = read_config(config.target, config.target_config, "target", config.trust_remote_code)
        for name in DROPOUT:
            if getattr(self._target_config, name, None):
                setattr(self._target_config, name, 0.0)
        dtype = stored_dtype(self._target_config) if config.target_dtype == "auto" else config.target_dtype
        self.setting = MemorySetting(
            config.strategy or "ddp",
            bool(training.bf16 or training.fp16),
            bool(training.activation_checkpointing),
            dtype,
            placement(config),
            int(training.per_device_train_batch_size),
            getattr(config, "lm_heads", "own"),
        )
        self.batch = BatchShape(int(config.sequence_length or 0), self.setting.rows, config.packing)
        self.capacity = (config.gpu_memory - config.reserve) * GIB
        self.sizes = ChunkSizes.on_gpu(config.gpu_memory * GIB, config.loss_chunk)
        self.target = lru_cache(self._target)
        self.heads = lru_cache(self._heads)
        self._forward = lru_cache(partial(trace_forward, self.mode))
        self._activations = lru_cache(partial(trace_draft, self.mode))
        self._losses = lru_cache(self.traced_losses)

    @property
    def joint(self) -> bool:
        """Whether the target is trained too."""
        return bool(self.config.trains_target)

    def bare_target(self, dtype: str) -> PreTrainedModel:
        """Return the target on the meta device."""
        code = self.config.trust_remote_code
        return empty_model(self._target_config, field="target", dtype=DTYPES[dtype], trust_remote_code=code)

    def _target(self, dtype: str) -> PreTrainedModel:
        model = self.prepared(self.bare_target(dtype))
        shadow(self.mode, model)
        return model

    def prepared(self, target: PreTrainedModel) -> PreTrainedModel:
        """Return the target with gradients where it trains."""
        return target.requires_grad_(False)

    @abstractmethod
    def _heads(self, lm_heads: str, half: bool) -> Any:
        """Return the heads in `mode`."""

    @abstractmethod
    def lm_heads(self, heads: Any) -> Sequence[nn.Module]:
        """Return the language-model heads."""

    @abstractmethod
    def weights(self, heads: Any) -> Weights:
        """Count the heads' numbers."""

    @abstractmethod
    def vocabulary(self, heads: Any) -> int:
        """Return the tokens that the heads draft among."""

    @abstractmethod
    def traced_losses(self, setting: MemorySetting, positions: int) -> tuple[float, float]:
        """Return `trace_losses` at so many positions; of the setting the dtypes matter, and `lm_heads`."""

    @abstractmethod
    def moments(self, setting: MemorySetting) -> list[Moment]:
        """Return the times at which memory may be at its most."""

    @abstractmethod
    def work(self, setting: MemorySetting) -> Work:
        """Return the arithmetic of the heads."""

    @abstractmethod
    def note(self, setting: MemorySetting) -> str:
        """Say what is trained."""

    @abstractmethod
    def own_changes(self) -> list[tuple[str, dict[str, Any]]]:
        """Return what may be changed of these heads: what the user is to write, and the fields of the setting."""

    def made(self, setting: MemorySetting) -> Any:
        """Return the heads as they compute under a setting."""
        return self.heads(setting.lm_heads, setting.precision == "half")

    def _trained(self, setting: MemorySetting) -> list[PreTrainedModel]:
        return [self.made(setting), *([self.target(setting.target_dtype)] if self.joint else [])]

    def held(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes that a GPU holds at all times, by what they are for."""
        heads, trained, training = self.made(setting), self._trained(setting), self.config.training
        optim = str(getattr(training.optim, "value", training.optim))
        name = "muon" if self.config.uses_muon(sharded=setting.strategy != "ddp") else optim
        states = sum(optimizer_bytes(module, name, self.lm_heads(heads)) for module in trained)
        count, weights = self._count(setting), self.weights(heads)
        weights = replace(weights, all=count if self.joint else weights.all, trained=count)
        own = held_bytes(weights, states, setting.strategy, self.config.gpus, setting.precision)
        renamed = {part.replace("draft:", "trained:" if self.joint else "heads:"): n for part, n in own.items()}
        return self.target_held(setting) | renamed

    def target_held(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes that the target takes at all times, and those rows of its head that are drafted among."""
        target = self.target(setting.target_dtype)
        if setting.target is None:  # a cache has what the others of its weights gave
            embed: Any = target.get_input_embeddings()
            ends = {id(weight): weight.nbytes for weight in (embed.weight, head_of(target).weight)}
            held = {"target: embeddings and head": float(sum(ends.values()))}
        else:
            held = target_bytes(target, setting.target, self.config.gpus)
        size, rows = self.vocabulary(self.made(setting)), head_of(target).weight
        copied = size < len(rows) and not replace(self.config.objective, partial=True).looks_outside
        return held | {"target: the head of the tokens that are drafted": rows[0].nbytes * size * copied}

    def _count(self, setting: MemorySetting) -> int:
        """Return the numbers that have gradients."""
        parameters = {id(p): p for module in self._trained(setting) for p in module.parameters() if p.requires_grad}
        return sum(parameter.numel() for parameter in parameters.values())

    def optimizer_step(self, setting: MemorySetting) -> Moment:
        """Return what the optimiser takes for a moment."""
        training = self.config.training
        optim = str(getattr(training.optim, "value", training.optim))
        size = step_bytes(optim, self._count(setting), setting.strategy, self.config.gpus)
        return Moment("the optimiser's step", {"optimiser: temporary": size})

    def loss_bytes(self, setting: MemorySetting, positions: int) -> tuple[float, float]:
        """Return `trace_losses` at so many positions: beyond eight chunks through four and eight of them."""
        setting = replace(setting, rows=0, checkpointing=False, target=None)  # traced once whatever these are
        few = 4 * max(1, self.sizes.chunk // self.vocabulary(self.made(setting)))
        if positions <= 2 * few:
            return self._losses(setting, positions)
        at_few, at_many = self._losses(setting, few), self._losses(setting, 2 * few)
        pairs = zip(at_few, at_many, strict=True)
        forward, backward = (Affine.through(few, a, 2 * few, b)(positions) for a, b in pairs)
        return forward, backward

    def frozen_forward(self, setting: MemorySetting) -> dict[str, float]:
        """Return what the target's forward takes; nothing here where the target is elsewhere."""
        if setting.target == "elsewhere":
            return {}
        forward = self._forward(self.target(setting.target_dtype), self.batch, "float32")
        return {"target: activations": forward(setting.rows)}

    def total(self, setting: MemorySetting) -> float:
        """Return the most bytes at any time, the reserve left out."""
        return sum(self.held(setting).values()) + max(moment.total for moment in self.moments(setting))

    def fits(self, setting: MemorySetting) -> bool:
        """Say whether they fit beside the reserve."""
        return self.total(setting) <= self.capacity

    def largest(self, setting: MemorySetting) -> int:
        """Return the most rows of a micro batch that fit, up to 1,024; 0 if one does not."""
        rows = 0
        for step in (2**n for n in reversed(range(11))):
            if rows + step <= 1024 and self.fits(replace(setting, rows=rows + step)):
                rows += step
        return rows

    def changes(self) -> Iterator[tuple[str, MemorySetting]]:
        """Yield what alone would make a run fit that does not; the cheap ones come first."""
        now, config = self.setting, self.config
        known: list[tuple[str, dict[str, Any]]] = []
        if rows := self.largest(now):
            known.append((f"training.per_device_train_batch_size {rows}", {"rows": rows}))
        if not now.half:
            known.append(("training.bf16 true", {"half": True}))
        known += self.own_changes()
        if config.gpus > 1 and config.optimizer != "muon":
            stronger = ZERO[ZERO.index(now.strategy) + 1 :] if now.strategy in ZERO else ()
            known += [(f"strategy {name}", {"strategy": name}) for name in stronger]
        if now.target == "whole" and config.gpus > 1 and not self.joint:
            known.append(("target_sharded true", {"target": "sharded"}))
        yield from ((name, s) for name, s in ((n, replace(now, **change)) for n, change in known) if self.fits(s))


def trace_losses(
    mode: Any,
    heads: Any,
    target: PreTrainedModel,
    objective: Objective,
    states_of: StatesOf,
    learned: Callable[[int], OutputHead],
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
        learned: the head of each guess.
        positions: that each guess is learned at.
        precision: how heads compute.
        sizes: of chunks.
        given: what is not counted.
    """
    with mode:
        of_target, tokens_D = head_of(target), heads.token_map
        hidden = torch.zeros(positions, of_target.weight.shape[1], dtype=of_target.weight.dtype)
        labels, objective = torch.zeros(positions, dtype=torch.long), replace(objective, partial=tokens_D is not None)
        cut = None if tokens_D is None else CutVocabulary(tokens_D, heads.config.vocab_size)
        kept = of_target if cut is None else cut.teacher_head(of_target, objective)
        sizes = sizes if cut is None else cut.training_sizes(sizes, objective)
        hold_gradients(heads)
        given = [*given, *tensors_of(heads), *tensors_of(target), hidden, labels, kept.weight]
        with LiveBytes(given) as live:
            with precision_of(precision):
                teacher: TeacherDistributions | None = None
                if objective.needs_target:
                    live_p = LiveDistributions(hidden, kept)
                    teacher = live_p if cut is None else cut.of_teacher(live_p, objective)
                learners = [
                    (state, learned(k), torch.ones(positions), 1.0) for k, state in enumerate(states_of(hidden))
                ]
                total = chunked_objectives(objective, labels, learners, teacher, sizes)
            forward = live.peak
            live.restart()
            total.backward()
        for parameter in heads.parameters():
            parameter.grad = None
    return float(forward), float(live.peak)
