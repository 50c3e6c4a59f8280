"""`draftsmith plan`: will this distillation run fit, and if not, what to change; without weights and without a GPU."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.draft_init import make_draft
from draftsmith.scripts.plan.activations import (
    Activations,
    Affine,
    Batch,
    fake_mode,
    shadow,
    trace_cache,
    trace_draft,
    trace_forward,
)
from draftsmith.scripts.plan.footprint import Footprint
from draftsmith.scripts.plan.model_states import (
    Placement,
    Precision,
    Strategy,
    Weights,
    held_bytes,
    optimizer_bytes,
    target_bytes,
)
from draftsmith.scripts.plan.report import GIB, report
from draftsmith.train.cli import parse_config, run
from draftsmith.train.lora import add_lora
from draftsmith.train.models import DTYPES, whole_weights

DOES_NOT_FIT = 3
ZERO: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "zero3")
DROPOUT = ("attention_dropout", "attn_pdrop")


@dataclass
class PlanConfig(DistillConfig):
    """Say whether a distillation run fits its GPUs, from the config that it will be started with.

    The fields of `draftsmith.distill` are read as there; those from `gpus` on are the plan's own.
    """

    gpus: int = 1
    """GPUs that train together."""
    gpu_memory: float = 80.0
    """Memory of each, in GiB."""
    strategy: Strategy | None = None
    """How the draft is spread: ddp, fsdp2, zero1, zero2 or zero3; by default what `training` says, or ddp. Where the
    target lies is not changed by it."""
    sequence_length: int | None = None
    """Tokens of a sample, padding included; `max_length` if not given."""
    target_config: str | None = None
    """The target's config.json, where the target itself cannot be reached."""
    draft_config: str | None = None
    """Likewise the draft's."""
    reserve: float = 3.0
    """GiB of each GPU that are set aside, by assumption and not by reckoning: the CUDA context (about 0.5), buffers of
    NCCL and cuBLAS (about 1), and what the allocator loses to fragmentation."""
    cache_k: int = 32
    """Tokens of a law in the teacher cache whose size is told."""
    cache_tokens: int = 100_000_000
    """Completion tokens that it is told for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gpus", "cache_k", "cache_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.gpu_memory <= self.reserve:
            raise InputError(f"gpu_memory: expected more than the reserve of {self.reserve}, found {self.gpu_memory}")
        if self.reserve < 0:
            raise InputError(f"reserve: expected at least 0, found {self.reserve}")
        if self.target_dtype not in DTYPES:
            raise InputError(f"target_dtype: expected one of {', '.join(DTYPES)}, found {self.target_dtype!r}")
        self.sequence_length = self.sequence_length or self.max_length
        if self.sequence_length is None:
            raise InputError("sequence_length: expected the tokens of a sample, here or in max_length, found none")
        if self.sequence_length < 2:
            raise InputError(f"sequence_length: expected at least 2, found {self.sequence_length}")
        if self.draft_config is not None and self.draft is None:
            raise InputError("draft_config: expected none for a draft made from the target, found one")
        if self.strategy is None:
            self.strategy = self._configured_strategy()
        if self.optimizer == "muon" and self.strategy != "ddp":
            raise InputError(f"optimizer: expected trainer for a draft under {self.strategy}, found muon")

    def _configured_strategy(self) -> Strategy:
        if self.training.fsdp:
            return "fsdp2"
        if not self.training.deepspeed:
            return "ddp"
        deepspeed: Any = self.training.hf_deepspeed_config
        stages: dict[int, Strategy] = {1: "zero1", 2: "zero2", 3: "zero3"}
        return stages.get(deepspeed.get_value("zero_optimization.stage", 0), "ddp")


@dataclass(frozen=True)
class Setting:
    """What a plan may change."""

    strategy: Strategy
    half: bool
    """Whether the draft computes in bfloat16 or float16."""
    checkpointing: bool
    target_dtype: str
    target: Placement | None
    """How the target lies on the GPUs; None with a teacher cache."""
    rows: int

    @property
    def precision(self) -> Precision:
        """How the draft computes."""
        return "float32" if not self.half else "autocast" if self.strategy == "ddp" else "half"


@dataclass(frozen=True)
class Change:
    """Something to try where a run does not fit."""

    field: str
    """Of a `Setting`."""
    name: str
    """What the user is to write."""
    value: Any

    def __call__(self, setting: Setting) -> Setting:
        """Return a setting with it."""
        return replace(setting, **{self.field: self.value})


class Planner:
    """A pair of models without data, and what runs with them would hold."""

    def __init__(self, config: PlanConfig):
        self.config = config
        self.mode = fake_mode()
        training = config.training
        self.setting = Setting(
            config.strategy or "ddp",
            bool(training.bf16 or training.fp16),
            bool(training.activation_checkpointing),
            config.target_dtype,
            _placement(config),
            int(training.per_device_train_batch_size),
        )
        self.eval_rows = int(training.per_device_eval_batch_size) if training.eval_strategy != "no" else 0
        self.batch = Batch(int(config.sequence_length or 0), self.setting.rows, config.packing)
        self.capacity = (config.gpu_memory - config.reserve) * GIB
        self.target = lru_cache(self._target)
        self.draft = lru_cache(self._draft)
        self.activations = lru_cache(self._activations)
        self.target_forward = lru_cache(self._target_forward)
        self.draft_forward = lru_cache(self._draft_forward)
        self._footprint = lru_cache(self._reckoned)
        self._check_length()

    @cached_property
    def _target_config(self) -> Any:
        config = self.config
        return read_config(config.target, config.target_config, "target", config.trust_remote_code)

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
            own = read_config(config.draft, config.draft_config, "draft", config.trust_remote_code)
            if init.pad_vocabulary:
                text, target_size = own.get_text_config(), self._target_config.get_text_config().vocab_size
                text.vocab_size = max(text.vocab_size, target_size)
            draft = self._built(own, "float32", "draft").requires_grad_(True)
            if init.lora is not None:
                with torch.device("meta"):
                    add_lora(draft, init.lora)
        shadow(self.mode, draft, half)  # float16 takes the bytes of bfloat16
        return draft

    def _built(self, config: Any, dtype: str, field: str) -> PreTrainedModel:
        for name in DROPOUT:  # fused kernels draw it anew in the backward; without a GPU it would be stored
            if getattr(config, name, None):
                setattr(config, name, 0.0)
        try:
            with torch.device("meta"), whole_weights():
                code = self.config.trust_remote_code
                model: Any = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], trust_remote_code=code)
        except (ValueError, TypeError, KeyError, ZeroDivisionError, RuntimeError) as error:
            raise InputError(f"{field}: expected the config of a causal LM, found: {first_line(error)}") from error
        return model

    def _check_length(self) -> None:
        for field, model in (("target", self.target(self.setting.target_dtype)), ("draft", self.draft(False))):
            most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
            if most is not None and self.batch.length > most:
                raise InputError(f"sequence_length: expected at most the {field}'s {most}, found {self.batch.length}")

    def _activations(self, precision: Precision, checkpointing: bool) -> Activations:
        return trace_draft(self.mode, self.draft(precision == "half"), self.batch, precision, checkpointing)

    def _target_forward(self, dtype: str) -> Affine:
        return trace_forward(self.mode, self.target(dtype), self.batch, "float32")

    def _draft_forward(self, precision: Precision) -> Affine:
        return trace_forward(self.mode, self.draft(precision == "half"), self.batch, precision)

    def footprint(self, setting: Setting) -> Footprint:
        """Return what a GPU holds under a setting, whatever its rows."""
        return self._footprint(replace(setting, rows=0))

    def _reckoned(self, setting: Setting) -> Footprint:
        config, precision, gpus = self.config, setting.precision, self.config.gpus
        draft = self.draft(precision == "half")
        weights = Weights.of(draft)
        optim = str(getattr(config.training.optim, "value", config.training.optim))
        name = "muon" if config.optimizer == "muon" else optim
        held = held_bytes(weights, optimizer_bytes(draft, name), setting.strategy, gpus, precision)
        target = None if setting.target is None else self.target(setting.target_dtype)
        if target is not None and setting.target is not None:
            held = target_bytes(target, setting.target, gpus) | held
        needed = setting.target not in (None, "elsewhere") and config.objective.needs_target
        share = 1 if setting.strategy == "ddp" else gpus
        copies = (name == "adamw_torch") + setting.strategy.startswith("zero")  # √v of all tensors; float32 gradients
        return Footprint(
            mode=self.mode,
            draft=draft,
            target=target,
            objective=config.objective,
            batch=self.batch,
            precision=precision,
            activations=self.activations(precision, setting.checkpointing),
            draft_forward=self.draft_forward(precision) if self.eval_rows else Affine(),
            cache=trace_cache(self.mode, draft, self.batch, precision) if config.on_policy else None,
            target_forward=self.target_forward(setting.target_dtype) if needed else Affine(),
            held=held,
            step=4.0 * copies * weights.trained / share,
            k=config.cache_k,
        )

    def total(self, setting: Setting) -> float:
        """Return the most bytes at any time, the reserve left out."""
        return self.footprint(setting).total(setting.rows, self.eval_rows)

    def fits(self, setting: Setting) -> bool:
        """Say whether they fit beside the reserve."""
        return self.total(setting) <= self.capacity

    def largest(self, setting: Setting) -> int:
        """Return the most rows of a micro batch that fit."""
        return self.footprint(setting).largest(self.capacity, self.eval_rows)

    def changes(self) -> Iterator[tuple[str, Setting]]:
        """Yield what would make a run fit that does not: each change that does alone, or else those that do together.

        Cheap ones come first; a smaller micro batch with more accumulation is among them.
        """
        now, config = self.setting, self.config
        known: list[Change] = []
        if not now.checkpointing:
            known.append(Change("checkpointing", "training.activation_checkpointing true", True))
        if not now.half:
            known.append(Change("half", "training.bf16 true", True))
        if now.target_dtype in ("float32", "float64") and now.target is not None:
            known.append(Change("target_dtype", "target_dtype bfloat16", "bfloat16"))
        if config.gpus > 1 and config.optimizer != "muon" and now.strategy in ZERO:
            stronger = ZERO[ZERO.index(now.strategy) + 1 :]
            known += [Change("strategy", f"strategy {strategy}", strategy) for strategy in stronger]
        if now.target == "whole":
            if config.gpus > 1:
                known.append(Change("target", "target_sharded true", "sharded"))
            known += [Change("target", f"target_quantization {bits}", bits) for bits in ("8bit", "4bit")]
        if now.target is not None and not config.on_policy:
            known.append(Change("target", "teacher_cache", None))
        fitting = [(change.name, change(now)) for change in known if self.fits(change(now))]
        rows = self.largest(now)
        if rows:
            fitting.insert(0, (f"training.per_device_train_batch_size {rows}", replace(now, rows=rows)))
        yield from fitting
        if fitting:
            return
        together, names = now, dict[str, str]()
        for change in known:
            together = change(together)
            names[change.field] = change.name  # of strategies and of places for the target the last is what counts
            rows = min(now.rows, self.largest(together))
            if rows:
                if rows < now.rows:
                    names["rows"] = f"training.per_device_train_batch_size {rows}"
                yield ", ".join(names.values()), replace(together, rows=rows)
                return


def _placement(config: PlanConfig) -> Placement | None:
    if config.teacher_cache:
        return None
    if config.target_device not in (None, "cuda"):
        return "elsewhere"
    if config.target_sharded:
        return "sharded"
    quantized: dict[str | None, Placement] = {"8bit": "8bit", "4bit": "4bit"}
    return quantized.get(config.target_quantization, "whole")


class _Tokens:
    """Stands in for a tokenizer of as many tokens as a target has logits: of a carved draft's no more is asked."""

    def __init__(self, target: PreTrainedModel):
        self.size: int = target.config.get_text_config().vocab_size

    def get_vocab(self) -> dict[str, int]:
        return {"": self.size - 1}


def read_config(path: str, file: str | None, field: str, trust_remote_code: bool = False) -> Any:
    """Read a model's config, from a config.json if one is given.

    Raises:
        InputError: it cannot be read; says how to go on without a network.
    """
    if file is not None and not Path(file).is_file():
        raise InputError(f"{field}_config: expected a config.json, found nothing at {file}")
    try:
        return AutoConfig.from_pretrained(file or path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        said = first_line(error)
        if file is not None:
            raise InputError(f"{field}_config: expected a model's config in {file}, found: {said}") from error
        raise InputError(
            f"{field}: expected a model directory or a hub id that can be reached, found {path}: {said} (without a "
            f"network, give its config.json as --{field}_config)"
        ) from error


def first_line(error: Exception) -> str:
    """Return what an error says first."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Plan as the flags say; 0 where the run fits, 3 where it does not."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The machine that plans need not be the one that trains: bf16 without this asks for a GPU here.
    config = parse_config(PlanConfig, [*arguments, "--training.use_cpu", "true"], prog="draftsmith plan")
    return 0 if report(Planner(config), Console()) else DOES_NOT_FIT


if __name__ == "__main__":
    sys.exit(run(main))
