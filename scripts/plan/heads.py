"""What training Medusa heads holds in GPU memory: heads of the shape that a config says, on a target without data."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from draftsmith.medusa.heads import MedusaConfig, MedusaHeads
from draftsmith.scripts.plan.activations import (
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
from draftsmith.scripts.plan.config import MedusaPlanConfig
from draftsmith.scripts.plan.memory_plan import DROPOUT, GIB, ZERO, MemorySetting, placement, read_config
from draftsmith.scripts.plan.model_states import (
    Precision,
    Weights,
    held_bytes,
    optimizer_bytes,
    target_bytes,
)
from draftsmith.scripts.plan.moments import Moment
from draftsmith.train.lora import add_lora
from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.chunked import chunked_sums
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.models import DTYPES, empty_model, stored_dtype
from draftsmith.train.teacher.distributions import LiveDistributions


class HeadsPlan:
    """Heads and their target without data, and what training them would hold."""

    def __init__(self, config: MedusaPlanConfig):
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
            config.lm_heads,
        )
        self.batch = BatchShape(int(config.sequence_length or 0), self.setting.rows, config.packing)
        self.capacity = (config.gpu_memory - config.reserve) * GIB
        self.sizes = ChunkSizes.on_gpu(config.gpu_memory * GIB, config.loss_chunk)
        self.target = lru_cache(self._target)
        self.heads = lru_cache(self._heads)
        self._forward = lru_cache(partial(trace_forward, self.mode))
        self._activations = lru_cache(partial(trace_draft, self.mode))
        self._losses = lru_cache(self._traced)

    def _target(self, dtype: str) -> PreTrainedModel:
        model = empty_model(
            self._target_config, field="target", dtype=DTYPES[dtype], trust_remote_code=self.config.trust_remote_code
        ).requires_grad_(self.config.backbone == "full")
        if self.config.backbone == "lora":
            with torch.device("meta"):
                add_lora(model, self.config.lora)
        shadow(self.mode, model)
        return model

    def _heads(self, lm_heads: str, half: bool) -> MedusaHeads:
        config, head = self.config, head_of(self.target(self.setting.target_dtype))
        vocab_size, hidden_size = head.weight.shape
        shape = MedusaConfig(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            num_heads=config.num_heads,
            num_hidden_layers=config.num_layers,
            truncated_vocab_size=min(config.draft_vocabulary or vocab_size, vocab_size),
            medusa_fc_bias=config.bias,
            original_lm_head=lm_heads == "shared",
            lm_head_bias=head.bias is not None,
            hydra=config.hydra,
        )
        with torch.device("meta"):
            heads = MedusaHeads(shape)
        for lm_head in heads.all_lm_heads:
            lm_head.requires_grad_(config.train_lm_heads)
        shadow(self.mode, heads, half)
        return heads

    def held(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes that a GPU holds at all times, by what they are for."""
        config, precision, gpus = self.config, setting.precision, self.config.gpus
        target, heads = self.target(setting.target_dtype), self.heads(setting.lm_heads, precision == "half")
        trained: list[PreTrainedModel] = [heads] if config.backbone == "frozen" else [heads, target]
        parameters = {id(p): p for module in trained for p in module.parameters() if p.requires_grad}
        count = sum(parameter.numel() for parameter in parameters.values())
        optim = str(getattr(config.training.optim, "value", config.training.optim))
        states = sum(
            optimizer_bytes(module, "muon" if config.optimizer == "muon" else optim, heads.all_lm_heads)
            for module in trained
        )
        largest = max(sum(p.numel() for p in part.parameters()) for part in (*heads.all_lm_heads, *heads.blocks))
        weights = Weights(count, count, 0, largest, 0, heads.config.hidden_size**2)
        whole = sum(p.numel() for p in heads.parameters())
        if config.backbone == "frozen":
            weights = replace(weights, all=whole)
        own = held_bytes(weights, states, setting.strategy, gpus, precision)
        renamed = {name.replace("draft:", "heads:" if len(trained) == 1 else "trained:"): n for name, n in own.items()}
        if config.backbone == "full":
            copy = "the target as it was: weights in float32, whole"
            return renamed | {copy: 4.0 * Weights.of(target).all * config.needs_original}
        return target_bytes(target, setting.target or "whole", gpus) | renamed

    def moments(self, setting: MemorySetting) -> list[Moment]:
        """Return the times at which memory may be at its most."""
        target, joint = self.target(setting.target_dtype), self.config.joint
        positions, weight = setting.rows * (self.batch.length - 1), head_of(target).weight
        forward, backward = (affine(positions) for affine in self._losses(replace(setting, rows=0)))
        hidden = float(positions * weight.shape[1] * weight.element_size())
        before = {} if setting.target == "elsewhere" else {"target: activations": self._frozen(setting)}
        parts = [Moment("the target's forward", before)]
        if joint:
            kept = self._activations(target, self.batch, setting.precision, setting.checkpointing)
            parts.append(Moment("the backbone's backward", {"backbone: activations": kept.backward(setting.rows)}))
            held = {"backbone: activations": kept.in_loss(setting.rows)}
        else:
            held = {}
        held["target: hidden states"] = hidden * (1 + joint)
        return [
            *parts,
            Moment("the losses", held | {"losses: states, logits of a chunk, gradients": forward}),
            Moment("the heads' backward", held | {"losses: gradients": backward}),
        ]

    def _frozen(self, setting: MemorySetting) -> float:
        return self._forward(self.target(setting.target_dtype), self.batch, "float32")(setting.rows)

    def _traced(self, setting: MemorySetting) -> tuple[Affine, Affine]:
        """Return `trace_losses` as functions of the positions, through four and eight chunks of them."""
        heads, target = self.heads(setting.lm_heads, setting.precision == "half"), self.target(setting.target_dtype)
        few = 4 * max(1, self.sizes.chunk // heads.config.truncated_vocab_size)
        at_few, at_many = (
            trace_losses(self.mode, heads, target, self.config, positions, setting.precision, self.sizes)
            for positions in (few, 2 * few)
        )
        forward, backward = (Affine.through(few, a, 2 * few, b) for a, b in zip(at_few, at_many, strict=True))
        return forward, backward

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
        if config.joint and not now.checkpointing:
            known.append(("training.activation_checkpointing true", {"checkpointing": True}))
        if now.target_dtype in ("float32", "float64") and config.backbone != "full":
            known.append(("target_dtype bfloat16", {"target_dtype": "bfloat16"}))
        if now.lm_heads == "own":
            known.append(("lm_heads shared", {"lm_heads": "shared"}))
        if config.gpus > 1 and config.optimizer != "muon":
            stronger = ZERO[ZERO.index(now.strategy) + 1 :] if now.strategy in ZERO else ()
            known += [(f"strategy {name}", {"strategy": name}) for name in stronger]
        if now.target == "whole" and config.backbone != "full":
            if config.gpus > 1 and not config.joint:
                known.append(("target_sharded true", {"target": "sharded"}))
            known += [(f"target_quantization {bits}", {"target": bits}) for bits in ("8bit", "4bit")]
        yield from ((name, s) for name, s in ((n, replace(now, **change)) for n, change in known) if self.fits(s))


def trace_losses(
    mode: FakeTensorMode,
    heads: MedusaHeads,
    target: PreTrainedModel,
    config: MedusaPlanConfig,
    positions: int,
    precision: Precision,
    sizes: ChunkSizes,
) -> tuple[float, float]:
    """Return the most bytes that the losses of all heads take in the forward, and in their backward.

    Args:
        mode: that heads and target were built in.
        heads: with `requires_grad` where they train.
        target: in its own dtype.
        config: with the objective.
        positions: that each head learns at.
        precision: how heads compute.
        sizes: of chunks.
    """
    with mode:
        weight, count = head_of(target).weight, heads.config.num_heads
        hidden = torch.zeros(positions, weight.shape[1], dtype=weight.dtype)
        labels = torch.zeros(positions, dtype=torch.long)
        seen = torch.zeros(positions, count, weight.shape[1], dtype=heads.dtype) if config.hydra else None
        hold_gradients(heads)
        given = [*tensors_of(heads), *tensors_of(target), hidden, labels, *([] if seen is None else [seen])]
        with LiveBytes(given) as live:
            with precision_of(precision):
                kept = head_of(target) if heads.token_map is None else head_of(target).of(heads.token_map)
                teacher = LiveDistributions(hidden, kept) if config.objective.needs_target else None
                states = [heads.states(i, hidden.to(heads.dtype), seen) for i in range(count)]
                learners = [(state, heads.head(i), torch.ones(positions, 1)) for i, state in enumerate(states)]
                total = chunked_sums(config.objective.features, labels, learners, teacher, sizes)
            forward = live.peak
            live.restart()
            total.backward()
        for parameter in heads.parameters():
            parameter.grad = None
    return float(forward), float(live.peak)
