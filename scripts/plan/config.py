"""What `draftsmith plan` is told: the config of the run that is planned, and the machines that it is to run on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from draftsmith.decode.errors import SHARE, InputError, at_least, finite, more_than, one_of, require
from draftsmith.distill.config import DistillConfig
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.heads.config import MedusaTrainingConfig
from draftsmith.train.data.prepare_config import PrepareConfig
from draftsmith.train.options import DTYPES
from draftsmith.train.teacher.cache_config import CacheConfig

Strategy = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]


@dataclass(kw_only=True)
class Machines:
    """The part of a plan that no run is told."""

    recipe: str = "distill"
    """What is planned: distill, medusa, eagle, cache or prepare. All fields of that command are read as there."""
    gpus: int = 1
    """GPUs that work together."""
    node_gpus: int = 8
    """GPUs of a machine; its processes share the host's memory."""
    gpu_memory: float = 80.0
    """Memory of each, in GiB."""
    device: str = "H100"
    """What they are, for the hours: one of the names of `draftsmith.train.job.flops.DEVICES`."""
    mfu: float = 0.35
    """The share of the device's bfloat16 arithmetic that the run will reach: an assumption, to be replaced by the `mfu`
    that a first run logs."""
    tokens: float = 1e8
    """Tokens to train on, to look at or to write, for the hours; over all epochs."""
    sequence_length: int | None = None
    """Tokens of a sample, padding included; `max_length` if not given, or what a prompt and its completion may have."""
    target_config: str | None = None
    """The target's config.json, where the target itself cannot be reached."""
    reserve: float = 3.0
    """GiB of each GPU that are set aside, by assumption and not by reckoning: the CUDA context (about 0.5), buffers of
    NCCL and cuBLAS (about 1), and what the allocator loses to fragmentation."""

    def __post_init__(self) -> None:
        from draftsmith.train.job.flops import DEVICES

        super().__post_init__()  # type: ignore[misc]
        require(self, at_least(1), "gpus", "node_gpus")
        require(self, one_of(DEVICES), "device")
        require(self, finite(more_than(0)), "tokens", "mfu", "gpu_memory")
        require(self, SHARE, "mfu")
        require(self, finite(at_least(0)), "reserve")
        if self.gpu_memory <= self.reserve:
            raise InputError(f"gpu_memory: expected more than the reserve of {self.reserve}, found {self.gpu_memory}")
        require(self, at_least(2), "sequence_length")

    def require_length(self, length: int | None) -> int:
        """Return the tokens of a sample.

        Raises:
            InputError: nothing says how many.
        """
        if self.sequence_length is None and length is None:
            raise InputError("sequence_length: expected the tokens of a sample, here or in max_length, found none")
        return int(self.sequence_length or length or 0)


@dataclass(kw_only=True)
class Training(Machines):
    """How a training run is spread."""

    strategy: Strategy | None = None
    """How what is trained is spread: ddp, fsdp2, zero1, zero2 or zero3; by default what `training` says, or ddp. Where
    a frozen target lies is not changed by it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        run: Any = self
        require(run, one_of(DTYPES), "target_dtype")
        self.sequence_length = self.require_length(run.max_length)
        if self.strategy is None:
            self.strategy = configured_strategy(run.training)
        if run.target_sharded and self.gpus == 1:
            raise InputError("target_sharded: expected more than one process, found one")
        if run.optimizer == "muon" and self.strategy != "ddp":
            raise InputError(f"optimizer: expected trainer for a draft under {self.strategy}, found muon")


@dataclass
class PlanConfig(Training, DistillConfig):
    """Say whether a run fits its GPUs and how long it takes, from the config that it will be started with.

    The fields of the run are read as its command does; `--recipe medusa`, `eagle`, `cache` and `prepare` have those
    of theirs.
    """

    draft_config: str | None = None
    """The draft's config.json, where the draft itself cannot be reached."""
    cache_k: int = 32
    """Tokens of a distribution in the teacher cache whose size is reported."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(1), "cache_k")
        if self.draft_config is not None and self.draft is None:
            raise InputError("draft_config: expected none for a draft made from the target, found one")


@dataclass
class MedusaPlanConfig(Training, MedusaTrainingConfig):
    """Say whether a training run of Medusa heads fits its GPUs and how long it takes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads is not None:
            raise InputError("heads: expected none in a plan, which is told their shape (num_heads, …), found one")


@dataclass
class EaglePlanConfig(Training, EagleTrainingConfig):
    """Say whether a training run of EAGLE-3 heads fits its GPUs and how long it takes."""


@dataclass
class CachePlanConfig(Machines, CacheConfig):
    """Say whether a teacher cache can be computed on some GPUs, how long it takes, and how large it is."""


@dataclass
class PreparePlanConfig(Machines, PrepareConfig):
    """Say whether completions can be written on some GPUs, and how long it takes."""


RECIPES: dict[str, type[Any]] = {
    "distill": PlanConfig,
    "medusa": MedusaPlanConfig,
    "eagle": EaglePlanConfig,
    "cache": CachePlanConfig,
    "prepare": PreparePlanConfig,
}


def plan_config(arguments: Sequence[str]) -> type[Any]:
    """Return the config of the plan that flags ask for: that of `--recipe`, or of distillation.

    Raises:
        InputError: another recipe.
    """
    words = [part for argument in arguments for part in argument.split("=", 1)]
    recipe = next((name for flag, name in pairwise(words) if flag == "--recipe"), "distill")
    one_of(RECIPES).check("recipe", recipe)
    return RECIPES[recipe]


def configured_strategy(training: Any) -> Strategy:
    """Return how training arguments spread what is trained."""
    if training.fsdp:
        return "fsdp2"
    if not training.deepspeed:
        return "ddp"
    stages: dict[int, Strategy] = {1: "zero1", 2: "zero2", 3: "zero3"}
    return stages.get(training.hf_deepspeed_config.get_value("zero_optimization.stage", 0), "ddp")
