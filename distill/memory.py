"""What a distillation run holds in GPU memory, from its config alone, and what to change where it does not fit."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError, at_most
from draftsmith.distill.config import DistillPlanConfig
from draftsmith.distill.draft_init import make_draft
from draftsmith.distill.footprint import Footprint
from draftsmith.distill.parallel.chains import most_masks
from draftsmith.distill.parallel.memory import MaskedBatch
from draftsmith.distill.vocabulary import keep_tokens
from draftsmith.train.lora import add_lora
from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.memory.activations import (
    Affine,
    BatchShape,
    shadow,
    trace_cache,
    trace_draft,
    trace_forward,
)
from draftsmith.train.memory.plan import DROPOUT, read_config
from draftsmith.train.memory.setting import GIB, ZERO, MemorySetting, placement
from draftsmith.train.memory.states import (
    Weights,
    held_bytes,
    optimizer_bytes,
    step_bytes,
    target_bytes,
)
from draftsmith.train.models import DTYPES, empty_model, stored_dtype


class MemoryPlan:
    """A pair of models without data, and what runs with them would hold."""

    def __init__(self, config: DistillPlanConfig):
        self.config = config
        self.mode = FakeTensorMode()
        training = config.training
        self.setting = MemorySetting(
            config.strategy or "ddp",
            bool(training.bf16 or training.fp16),
            bool(training.activation_checkpointing),
            config.target_dtype,
            placement(config),
            int(training.per_device_train_batch_size),
        )
        self.eval_rows = int(training.per_device_eval_batch_size) if training.eval_strategy != "no" else 0
        self.batch = BatchShape(int(config.sequence_length or 0), self.setting.rows, config.packing)
        self.fed = self._fed(most_masks(self.batch.length, config.kept_shares)) if config.parallel else self.batch
        """The batch as the draft is fed it."""
        self.sizes = ChunkSizes.on_gpu(config.gpu_memory * GIB, config.loss_chunk)
        self.capacity = (config.gpu_memory - config.reserve) * GIB
        self._target_config: Any = read_config(config.target, config.target_config, "target", config.trust_remote_code)
        if config.target_dtype == "auto":
            self.setting = replace(self.setting, target_dtype=stored_dtype(self._target_config))
        self.target = lru_cache(self._target)
        self.draft = lru_cache(self._draft)
        self._forward = lru_cache(partial(trace_forward, self.mode))
        self._activations = lru_cache(partial(trace_draft, self.mode))
        self._footprint = lru_cache(self._computed_footprint)
        self._check_length()

    def _fed(self, masks: int) -> MaskedBatch:
        dense = self.config.attn_implementation != "flex_attention"
        return MaskedBatch(self.batch.length, self.batch.rows, self.batch.packed, masks, dense)

    def _target(self, dtype: str) -> PreTrainedModel:
        target = self._built(self._target_config, dtype, "target").requires_grad_(False)
        shadow(self.mode, target)
        return target

    def _draft(self, half: bool) -> PreTrainedModel:
        config, init = self.config, self.config.init
        if config.draft is None:
            target = self._built(self._target_config, self.setting.target_dtype, "target")
            with torch.device("meta"):
                draft, _ = make_draft(None, init, target, _Tokens(target))  # type: ignore[arg-type]
        else:
            draft_config: Any = read_config(config.draft, config.draft_config, "draft", config.trust_remote_code)
            if init.pad_vocabulary:
                text, target_size = draft_config.get_text_config(), self._target_config.get_text_config().vocab_size
                text.vocab_size = max(text.vocab_size, target_size)
            draft = self._built(draft_config, "float32", "draft").requires_grad_(True)
            if init.lora is not None:
                with torch.device("meta"):
                    add_lora(draft, init.lora)
        if init.draft_vocabulary is not None:  # which tokens they are does not matter
            at_most(draft.config.get_text_config().vocab_size).check("init.draft_vocabulary", init.draft_vocabulary)
            keep_tokens(draft, range(init.draft_vocabulary))
        shadow(self.mode, draft, half)  # float16 takes the bytes of bfloat16
        return draft

    def _built(self, config: Any, dtype: str, field: str) -> PreTrainedModel:
        for name in DROPOUT:  # fused kernels draw it anew in the backward; without a GPU it would be stored
            if getattr(config, name, None):
                setattr(config, name, 0.0)
        code = self.config.trust_remote_code
        return empty_model(config, field=field, dtype=DTYPES[dtype], trust_remote_code=code)

    def _check_length(self) -> None:
        for field, model in (("target", self.target(self.setting.target_dtype)), ("draft", self.draft(False))):
            most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
            if most is not None and self.batch.length > most:
                raise InputError(f"sequence_length: expected at most the {field}'s {most}, found {self.batch.length}")

    def footprint(self, setting: MemorySetting) -> Footprint:
        """Return what a GPU holds under a setting, whatever its rows."""
        return self._footprint(replace(setting, rows=0))

    def _computed_footprint(self, setting: MemorySetting) -> Footprint:
        config, precision, gpus = self.config, setting.precision, self.config.gpus
        draft = self.draft(precision == "half")
        weights = Weights.of(draft)
        optim = str(getattr(config.training.optim, "value", config.training.optim))
        name = "muon" if config.uses_muon(sharded=setting.strategy != "ddp") else optim
        held = held_bytes(weights, optimizer_bytes(draft, name), setting.strategy, gpus, precision)
        target = None if setting.target is None else self.target(setting.target_dtype)
        if target is not None and setting.target is not None:
            held = target_bytes(target, setting.target, gpus) | held
        needed = setting.target not in (None, "elsewhere") and config.objective.needs_target
        evaluated = self._fed(self.batch.length) if config.parallel else self.batch
        return Footprint(
            mode=self.mode,
            draft=draft,
            target=target,
            objective=config.objective,
            batch=self.fed,
            precision=precision,
            activations=self._activations(draft, self.fed, precision, setting.checkpointing),
            draft_forward=self._forward(draft, evaluated, precision) if self.eval_rows else Affine(),
            cache=trace_cache(self.mode, draft, self.batch, precision) if config.on_policy else None,
            target_forward=self._forward(target, self.batch, "float32") if needed else Affine(),
            held=held,
            sizes=self.sizes,
            step=step_bytes(name, weights.trained, setting.strategy, gpus),
            k=config.cache_k,
        )

    def total(self, setting: MemorySetting) -> float:
        """Return the most bytes at any time, the reserve left out."""
        return self.footprint(setting).total(setting.rows, self.eval_rows)

    def fits(self, setting: MemorySetting) -> bool:
        """Say whether they fit beside the reserve."""
        return self.total(setting) <= self.capacity

    def largest(self, setting: MemorySetting) -> int:
        """Return the most rows of a micro batch that fit."""
        return self.footprint(setting).largest(self.capacity, self.eval_rows)

    def changes(self) -> Iterator[tuple[str, MemorySetting]]:
        """Yield what would make a run fit that does not: each change that does alone, or else those that do together.

        Cheap ones come first; a smaller micro batch with more accumulation is among them.
        """
        now, config = self.setting, self.config
        known: list[tuple[str, str, Any]] = []  # what the user is to write, the field of the setting, and its value
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
            if config.gpus > 1:
                known.append(("target_sharded true", "target", "sharded"))
            known += [(f"target_quantization {bits}", "target", bits) for bits in ("8bit", "4bit")]
        if now.target is not None and not config.on_policy:
            known.append(("teacher_cache", "target", None))
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
            names[field] = name  # of strategies and of places for the target the last is what counts
            if rows := min(now.rows, self.largest(together)):
                if rows < now.rows:
                    names["rows"] = f"training.per_device_train_batch_size {rows}"
                yield ", ".join(names.values()), replace(together, rows=rows)
                return


class _Tokens:
    """Stands in for a tokenizer of as many tokens as a target has logits: of a carved draft's no more is asked."""

    def __init__(self, target: PreTrainedModel):
        self.size: int = target.config.get_text_config().vocab_size

    def get_vocab(self) -> dict[str, int]:
        return {"": self.size - 1}
