"""A training step, traced without data and without a GPU.

No formula for a family is used. The trainer's own loss and its backward run on tensors that have shapes but no data
(`FakeTensorMode`), and every storage is counted from its allocation to its release. The figures thus include all that
PyTorch keeps for the backward, such as two copies of a norm's input and a dropout's mask, and follow the code when it
changes.

For a GPT layer in half precision on s tokens of b rows with hidden size h, Korthikanti et al. 2022 (section 4.1) count
34·s·b·h bytes and 5·a·s²·b more for the attention matrix, which fused attention recomputes (their section 5). This
count is higher: eager kernels also keep intermediate results of activations and norms that take several operations, and
with packed rows a mask of 2·b·s² bytes a layer.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.decode.cache.kernels import CudaKernels

GROUPED = torch.ops.aten._grouped_mm.default
"""The product of a mixture's experts."""

Precision = Literal["float32", "autocast", "half"]
"""How a drafter computes: in float32; from float32 weights under autocast; from half-precision copies of them."""


class GroupedMaps(TorchDispatchMode):
    """Lets the experts' product run on fake tensors of any dtype: it takes all, but its shape function only one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not GROUPED or args[0].dtype == torch.bfloat16:
            return func(*args, **(kwargs or {}))
        halves = (tensor.to(torch.bfloat16) for tensor in args[:2])
        return func(*halves, *args[2:], **(kwargs or {})).to(args[0].dtype)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of living storages that operations allocate, on fake tensors or real ones.

    Where CUDA would run attention by the math kernel, which holds all scores, so does this.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        """The most bytes since `restart`."""
        self._sizes: dict[int, int] = {}
        self._kernels, self._grouped = CudaKernels(), GroupedMaps()  # the latter's stand-ins are not counted

    def __enter__(self) -> "LiveBytes":
        self._kernels.__enter__()
        self._grouped.__enter__()
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._grouped.__exit__(*error)
        self._kernels.__exit__(*error)

    def restart(self) -> int:
        """Return the peak, and restart its count."""
        peak, self.peak = self.peak, self.now
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # the most frequent call on fake tensors
            return args[0].fake_device
        kwargs = kwargs or {}
        self._meet((*args, *kwargs.values()), counted=False)  # an operand that no operation returned was there before
        out = func(*args, **kwargs)
        self._meet((out,), counted=True)
        return out

    def _meet(self, values: Any, counted: bool) -> None:
        for value in values:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = size = storage.nbytes() * counted
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._release, storage._cdata)
            elif isinstance(value, list | tuple):
                self._meet(value, counted)

    def _release(self, number: int) -> None:
        self.now -= self._sizes.pop(number)


class Phases:
    """A trainer's clock that keeps the most bytes of each phase, in place of its seconds."""

    def __init__(self, live: LiveBytes):
        self.live = live
        self.peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as a phase, and all before it as the drafter's forward."""
        self.end("forward")
        yield
        self.end(name)

    def end(self, name: str) -> None:
        """Count all since the last end as a phase."""
        self.peaks[name] = max(self.peaks.get(name, 0), self.live.restart())


@dataclass(frozen=True)
class BatchShape:
    """The shape of a model's input."""

    length: int  # tokens of a row
    rows: int = 1
    packed: bool = False  # whether rows have positions in place of a mask

    def inputs(self) -> dict[str, Tensor]:
        """Return a batch, (B, T) each, of padded texts or packed ones."""
        ids = torch.zeros(self.rows, self.length, dtype=torch.long)
        return {"input_ids": ids} | ({"position_ids": torch.ones_like(ids)} if self.packed else {})

    def labelled(self, ahead: int) -> dict[str, Any]:
        """Return a batch as a trainer takes it, which learns at all positions, `ahead` tokens past the next one."""
        counts = [max(0, self.rows * (self.length - 1 - i)) for i in range(ahead + 1)]
        return self.inputs() | {"positions": [torch.zeros(count, dtype=torch.long) for count in counts]}


class InPrecision(nn.Module):
    """A model whose forward computes in a precision, as a trainer calls it."""

    def __init__(self, model: nn.Module, precision: Precision):
        super().__init__()
        self.model, self.precision, self.training = model, precision, model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output."""
        with precision_of(self.precision):
            return self.model(*args, **kwargs)


def shadow(mode: FakeTensorMode, *models: nn.Module, half: bool = False) -> None:
    """Give meta models tensors of a mode, in place, so that they run as on the CPU; tied weights stay tied.

    `half` makes the weights half precision.
    """
    empty: dict[int, Tensor] = {}
    with mode:
        for module in (module for model in models for module in model.modules()):
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if id(parameter) not in empty:
                    dtype = torch.bfloat16 if half else parameter.dtype
                    data = torch.empty(parameter.shape, dtype=dtype, device="cpu")
                    empty[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
                setattr(module, name, empty[id(parameter)])
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu"))


def precision_of(precision: Precision) -> torch.autocast:
    """Return the context that a forward in a precision runs in."""
    # float16 takes the same bytes. FSDP's half-precision copies run under autocast too, which changes little.
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast")


def hold_gradients(model: nn.Module) -> None:
    """Give a model the gradients that it holds at all times, to which a step adds its own."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
