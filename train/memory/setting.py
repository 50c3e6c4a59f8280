"""The settings of a plan: the machines, and how a training run is spread over them.

This module is light, since `--help` must not wait for torch.
"""

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar, Literal

from draftsmith.decode.errors import SHARE, InputError, at_least, finite, more_than, one_of, require
from draftsmith.train.options import DTYPES
from draftsmith.train.recipe import RecipeConfig

GIB = 2**30

Strategy = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]

Precision = Literal["float32", "autocast", "half"]
"""How a drafter computes: in float32; from float32 weights under autocast; from half-precision copies of them."""

Placement = Literal["whole", "sharded", "8bit", "4bit", "elsewhere"]
"""The place of a target on the GPUs that train the drafter."""

ZERO: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "zero3")
"""Strategies that divide more and more."""


def gib(size: float) -> str:
    """Format bytes as GiB."""
    return f"{size / GIB:.2f}"


@dataclass(kw_only=True)
class Machines:
    """The planner's own settings, the machines: a second base with the dataclass of the run."""

    plan_class: ClassVar[str]
    """The class of the plan, or a function that returns one, as "module:name"."""

    recipe: str = "distill"
    """The command that is planned, one that trains drafters. All its fields are read as there."""
    gpus: int = 1
    """GPUs that work together."""
    node_gpus: int = 8
    """GPUs of a machine; its processes share the host's memory."""
    gpu_memory: float = 80.0
    """Memory of each, in GiB."""
    device: str = "H100"
    """Their model, for the hours: one of the names of `draftsmith.train.job.flops.DEVICES`."""
    mfu: float = 0.35
    """The share of the device's bfloat16 arithmetic that the run will reach: an assumption, to be replaced by the `mfu`
    that a first run logs."""
    tokens: float = 1e8
    """Tokens to train on, for the hours; over all epochs."""
    sequence_length: int | None = None
    """Tokens of a sample, padding included; `max_length` if not given."""
    target_config: str | None = None
    """The target's config.json, where the target itself cannot be reached."""
    reserve: float = 3.0
    """GiB of each GPU that are set aside, by assumption and not by reckoning: the CUDA context (about 0.5), buffers of
    NCCL and cuBLAS (about 1), and what the allocator loses to fragmentation."""
    strategy: Strategy | None = None
    """How what is trained is spread: ddp, fsdp2, zero1, zero2 or zero3; by default what `training` says, or ddp. Where
    a frozen target lies is not changed by it."""

    def __post_init__(self) -> None:
        from draftsmith.train.job.flops import DEVICES

        super().__post_init__()  # type: ignore[misc]
        run: Any = self
        require(self, at_least(1), "gpus", "node_gpus")
        require(self, one_of(DEVICES), "device")
        require(self, finite(more_than(0)), "tokens", "mfu", "gpu_memory")
        require(self, SHARE, "mfu")
        require(self, finite(at_least(0)), "reserve")
        if self.gpu_memory <= self.reserve:
            raise InputError(f"gpu_memory: expected more than the reserve of {self.reserve}, found {self.gpu_memory}")
        require(self, at_least(2), "sequence_length")
        require(run, one_of(DTYPES), "target_dtype")
        self.sequence_length = self.sequence_length or run.max_length
        if self.sequence_length is None:
            raise InputError("sequence_length: expected the tokens of a sample, here or in max_length, found none")
        self.strategy = self.strategy or configured_strategy(run.training)
        if run.target_sharded and self.gpus == 1:
            raise InputError("target_sharded: expected more than one process, found one")
        if run.optimizer == "muon" and self.strategy != "ddp":
            raise InputError(f"optimizer: expected trainer for a draft under {self.strategy}, found muon")

    def memory_plan(self) -> Any:
        """Return the plan, a `train.memory.plan.MemoryPlan`."""
        module, _, name = self.plan_class.partition(":")
        return getattr(import_module(module), name)(self)


def configured_strategy(training: Any) -> Strategy:
    """Return how training arguments spread what is trained."""
    if training.fsdp:
        return "fsdp2"
    if not training.deepspeed:
        return "ddp"
    stages: dict[int, Strategy] = {1: "zero1", 2: "zero2", 3: "zero3"}
    return stages.get(training.hf_deepspeed_config.get_value("zero_optimization.stage", 0), "ddp")


@dataclass(frozen=True)
class MemorySetting:
    """The part of a run that a plan may change."""

    strategy: Strategy
    half: bool  # whether the drafter computes in bfloat16 or float16
    checkpointing: bool
    target_dtype: str
    target: Placement | None  # None with a teacher cache, or with states from servers
    rows: int
    lm_heads: str = "own"  # "shared" for heads with one language-model head

    @property
    def precision(self) -> Precision:
        """How the drafter computes."""
        return "float32" if not self.half else "autocast" if self.strategy == "ddp" else "half"

    @property
    def traced(self) -> "MemorySetting":
        """The setting that stands for all with the same activations."""
        strategy: Strategy = "zero1" if self.precision == "half" else "ddp"
        return replace(self, rows=0, strategy=strategy, target=self.target and "whole")


def placement(config: RecipeConfig) -> Placement | None:
    """Return how a config places the target; None for a teacher cache in its place."""
    if config.teacher_cache:
        return None
    if config.target_device not in (None, "cuda"):
        return "elsewhere"
    if config.target_sharded:
        return "sharded"
    quantized: dict[str | None, Placement] = {"8bit": "8bit", "4bit": "4bit"}
    return quantized.get(config.target_quantization, "whole")
