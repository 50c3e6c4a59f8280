"""The machines that a plan is for; a light module, since `--help` must not wait for torch."""

from dataclasses import dataclass
from typing import Literal

from draftsmith.decode.errors import SHARE, InputError, at_least, finite, more_than, one_of, require

GIB = 2**30
RESERVE = 3 * GIB
"""Bytes of each GPU that are set aside, by assumption and not by reckoning: the CUDA context (about 0.5 GiB), buffers
of NCCL and cuBLAS (about 1), and the allocator's fragmentation."""

Strategy = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]


@dataclass
class Machines:
    """Say whether a training run fits its GPUs and how long it takes, without weights and without a GPU.

    Usage: draftsmith plan COMMAND, with the flags of this training command, such as --config FILE, and those below.
    """

    gpus: int = 1
    """GPUs that work together."""
    gpu_memory: float = 80.0
    """Memory of each, in GiB."""
    device: str = "H100"
    """Their model, for the hours: one of the names of `draftsmith.train.job.flops.DEVICES`."""
    mfu: float = 0.35
    """The share of the device's bfloat16 arithmetic that the run will reach: an assumption, to be replaced by the `mfu`
    that a first run logs."""
    tokens: float = 1e8
    """Tokens to train on, for the hours; over all epochs."""
    strategy: Strategy | None = None
    """How what is trained is spread: ddp, fsdp2, zero1, zero2 or zero3; by default what `training` says, or ddp. Where
    a frozen target lies is not changed by it."""

    def __post_init__(self) -> None:
        from draftsmith.train.job.flops import DEVICES

        require(self, at_least(1), "gpus")
        require(self, one_of(DEVICES), "device")
        require(self, finite(more_than(0)), "tokens", "mfu", "gpu_memory")
        require(self, SHARE, "mfu")
        if self.gpu_memory * GIB <= RESERVE:
            raise InputError(f"gpu_memory: expected more than the reserve of {RESERVE / GIB}, found {self.gpu_memory}")
