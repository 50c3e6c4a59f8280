"""What `draftsmith plan` is told."""

from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.decode.errors import InputError, at_least, one_of, require
from draftsmith.distill.config import DistillConfig
from draftsmith.train.options import DTYPES

Strategy = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]


@dataclass
class PlanConfig(DistillConfig):
    """Say whether a distillation run fits its GPUs, from the config that it will be started with.

    The fields of `draftsmith.distill` are read as there; those from `gpus` on are those of the plan.
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
    """Tokens of a distribution in the teacher cache whose size is reported."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(1), "gpus", "cache_k")
        require(self, at_least(0), "reserve")
        require(self, one_of(DTYPES), "target_dtype")
        if self.gpu_memory <= self.reserve:
            raise InputError(f"gpu_memory: expected more than the reserve of {self.reserve}, found {self.gpu_memory}")
        self.sequence_length = self.sequence_length or self.max_length
        if self.sequence_length is None:
            raise InputError("sequence_length: expected the tokens of a sample, here or in max_length, found none")
        require(self, at_least(2), "sequence_length")
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
