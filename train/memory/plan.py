"""Memory plans: whether a run fits its GPUs and how long it takes, from its config, without weights or a GPU.

Kernels' workspaces and the allocator's fragmentation are not counted; a plan sets a reserve aside for them.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, PreTrainedModel

from draftsmith.decode.errors import InputError, first_line
from draftsmith.train.job.flops import DEVICES
from draftsmith.train.memory.activations import BatchShape, shadow, trace_forward
from draftsmith.train.memory.moments import Moment
from draftsmith.train.memory.setting import GIB, Machines, MemorySetting
from draftsmith.train.models import DTYPES, empty_model, stored_dtype

DROPOUT = ("attention_dropout", "attn_pdrop")
PROCESS = 3 * GIB
"""Python, torch and CUDA's libraries in one process."""


def read_config(path: str, file: str | None, field: str, trust_remote_code: bool = False) -> Any:
    """Read a model's config, from a config.json if one is given; the error says what to do without a network."""
    if file is not None and not Path(file).is_file():
        raise InputError(f"{field}_config: expected a config.json, found nothing at {file}")
    try:
        return AutoConfig.from_pretrained(file or path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        wrong = f"{field}_config: expected a model's config in {file}, found: {first_line(error)}"
        if file is None:
            wrong = f"{field}: expected a model directory or a hub id that can be reached, found {path}: "
            wrong += f"{first_line(error)} (without a network, give its config.json as --{field}_config)"
        raise InputError(wrong) from error


class MemoryPlan(ABC):
    """A target without data, and the memory of a GPU that runs it."""

    most_rows: ClassVar[int]
    """The largest batch that is tried."""
    batch_name: ClassVar[str] = "batch"
    row_name: ClassVar[str] = "text"
    dtype_field: ClassVar[str] = "dtype"
    """The config's field for the target's dtype."""

    def __init__(self, config: Any, setting: MemorySetting, length: int, packed: bool = False):
        machines: Machines = config
        self.config = config
        self.mode = FakeTensorMode()
        self.target_shape: Any = read_config(config.target, machines.target_config, "target", config.trust_remote_code)
        if setting.target_dtype == "auto":
            setting = replace(setting, target_dtype=stored_dtype(self.target_shape))
        self.setting = setting
        """The setting of the run's config."""
        self.batch = BatchShape(length, setting.rows, packed)
        """The target's input."""
        self.capacity = (machines.gpu_memory - machines.reserve) * GIB
        """The bytes of a GPU without the reserve."""
        self.target = lru_cache(self._target)
        """The target in a dtype, without data."""
        self.forward_bytes = lru_cache(partial(trace_forward, self.mode))

    def _target(self, dtype: str) -> PreTrainedModel:
        target = self.empty_target(dtype)
        shadow(self.mode, target)
        return target

    def empty_target(self, dtype: str) -> PreTrainedModel:
        """Return the target on the meta device, with gradients where it trains."""
        return self.empty(self.target_shape, dtype, "target").requires_grad_(False)

    def empty(self, shape: Any, dtype: str, field: str) -> PreTrainedModel:
        """Return a model on the meta device, without dropout in attention.

        Fused kernels draw it again in the backward; without a GPU it would be stored.
        """
        for name in DROPOUT:
            if getattr(shape, name, None):
                setattr(shape, name, 0.0)
        code = self.config.trust_remote_code
        return empty_model(shape, field=field, dtype=DTYPES[dtype], trust_remote_code=code)

    @abstractmethod
    def held(self, setting: MemorySetting) -> dict[str, float]:
        """Return the bytes that a GPU holds at all times, by their use."""

    @abstractmethod
    def moments(self, setting: MemorySetting) -> list[Moment]:
        """Return the times at which memory may peak."""

    @abstractmethod
    def hours(self) -> float | None:
        """Return the hours of `tokens` tokens; None where a model's arithmetic is not known."""

    @abstractmethod
    def title(self) -> str:
        """Return a line that says what is planned."""

    def facts(self) -> list[str]:
        """Return lines to print after the table."""
        return []

    def remarks(self) -> list[str]:
        """Return lines to print last."""
        return []

    def advice(self) -> list[str]:
        """Return changes that would make a run fit, a line each."""
        return []

    def assumptions(self) -> list[str]:
        """Return the assumptions of the hours."""
        return [f"by assumption {self.config.mfu:.0%} of {DEVICES[self.config.device]} TFLOP/s each"]

    def speed(self) -> float:
        """Return the operations a second that a GPU reaches, by assumption."""
        return DEVICES[self.config.device] * 1e12 * self.config.mfu

    def host_bytes(self) -> dict[str, float]:
        """Return the host's memory in bytes while a machine's processes load models, by use; without completions."""
        return {"processes": float(PROCESS * self.processes)}

    @property
    def processes(self) -> int:
        """The processes of one machine."""
        return min(int(self.config.gpus), int(self.config.node_gpus))

    def peak(self, setting: MemorySetting) -> Moment:
        """Return the moment with the most."""
        return max(self.moments(setting), key=lambda moment: moment.total)

    def total(self, setting: MemorySetting) -> float:
        """Return the peak in bytes, without the reserve."""
        return sum(self.held(setting).values()) + self.peak(setting).total

    def fits(self, setting: MemorySetting) -> bool:
        """Return whether the peak and the reserve fit."""
        return self.total(setting) <= self.capacity

    def largest(self, setting: MemorySetting) -> int:
        """Return the most rows of a micro batch that fit, up to `most_rows`; 0 if one does not."""
        rows = 0
        for step in (2**n for n in reversed(range(self.most_rows.bit_length()))):
            if rows + step <= self.most_rows and self.fits(replace(setting, rows=rows + step)):
                rows += step
        return rows
