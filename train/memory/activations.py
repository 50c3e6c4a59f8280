"""Activations, traced without data and without a GPU.

No formula for a family is used. The models' forward and backward and the loss run on tensors that have shapes but no
data (`FakeTensorMode`), and every storage is counted from its allocation to its release. The figures thus include all
that PyTorch keeps for the backward, such as two copies of a norm's input and a dropout's mask, and follow the code when
it changes. Of equal layers, only a few are run (`layers`).

For a GPT layer in half precision on s tokens of b rows with hidden size h, Korthikanti et al. 2022 (section 4.1) count
34·s·b·h bytes and 5·a·s²·b more for the attention matrix, which fused attention recomputes (their section 5). This
count is higher: eager kernels also keep intermediate results of activations and norms that take several operations, and
with packed rows a mask of 2·b·s² bytes a layer.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import decoder_of
from draftsmith.decode.cache.kernels import CudaKernels
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.losses.positions import LossPositions
from draftsmith.train.memory.layers import Course, traced_by_layers
from draftsmith.train.memory.setting import Precision

GROUPED = torch.ops.aten._grouped_mm.default
"""The product of a mixture's experts."""


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
        self._start, self._turns = 0, list[int]()
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

    def restart(self) -> None:
        """Restart the count of the peak."""
        self.peak = self._start = self.now
        self._turns = []

    @property
    def course(self) -> Course:
        """The rise and fall of the bytes since `restart`."""
        return Course(self._start, tuple(self._turns))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # the most frequent call on fake tensors
            return args[0].fake_device
        self._meet((args, kwargs), counted=False)  # an operand that no operation returned was there before
        out = func(*args, **(kwargs or {}))
        self._meet(out, counted=True)
        return out

    def _meet(self, values: Any, counted: bool) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = size = storage.nbytes() * counted
                    self._change(size)
                    weakref.finalize(storage, self._release, storage._cdata)

    def _release(self, number: int) -> None:
        self._change(-self._sizes.pop(number))

    def _change(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)
        if self._turns and (self._turns[-1] > 0) == (size > 0):
            self._turns[-1] += size
        elif size:
            self._turns.append(size)


@dataclass(frozen=True)
class Affine:
    """Bytes that grow with the number of rows."""

    constant: float = 0.0
    per_row: float = 0.0

    @classmethod
    def through(cls, few: int, at_few: float, many: int, at_many: float) -> "Affine":
        """Return the function through two values."""
        slope = (at_many - at_few) / (many - few)
        return cls(at_few - slope * few, slope)

    def __call__(self, rows: float) -> float:
        """Return the bytes for a number of rows."""
        return self.constant + self.per_row * rows


@dataclass(frozen=True)
class Activations:
    """The bytes of a drafter's step, without weights and their gradients."""

    teacher: Affine  # the peak of the target's forward
    forward: Affine  # the peak of its own forward
    in_loss: Affine  # during the loss: what is kept for the backward, and autocast's copies of weights
    after_loss: Affine  # after the loss: what is kept for the backward
    backward: Affine  # the peak of its backward, with `after_loss`


@dataclass(frozen=True)
class BatchShape:
    """The shape of a model's input."""

    length: int  # tokens of a row
    rows: int = 1
    """Figures are exact for this number of rows. A peak is the largest of several affine functions of the rows, so the
    figures may be too high up to four times this number, and a little too low above it."""
    packed: bool = False  # whether rows have positions in place of a mask

    def affine(self, bytes_of: Callable[[int], list[int]]) -> list[Affine]:
        """Return functions of the number of rows, from the bytes at `rows` and at four times `rows`."""
        few, many = self.rows, 4 * self.rows
        return [Affine.through(few, a, many, b) for a, b in zip(bytes_of(few), bytes_of(many), strict=True)]

    def inputs(self, rows: int) -> dict[str, Tensor]:
        """Return a batch of rows, (B, T) each, of padded texts or packed ones."""
        ids = torch.zeros(rows, self.length, dtype=torch.long)
        return {"input_ids": ids} | ({"position_ids": torch.ones_like(ids)} if self.packed else {})

    def labelled(self, rows: int, ahead: int = 0, positions: int | None = None) -> dict[str, Any]:
        """Return a batch as a trainer takes it, of completions; `positions` with a loss if not None."""
        counts = (max(0, rows * (self.length - 1 - i)) if positions is None else positions for i in range(ahead + 1))
        return self.inputs(rows) | {"positions": [torch.zeros(count, dtype=torch.long) for count in counts]}


class InPrecision(nn.Module):
    """A model whose forward computes in a precision, as a trainer calls it."""

    def __init__(self, model: nn.Module, precision: Precision):
        super().__init__()
        self.model, self.precision, self.training = model, precision, model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output."""
        with precision_of(self.precision):
            return self.model(*args, **kwargs)


def shadow(mode: FakeTensorMode, model: nn.Module, half: bool = False) -> None:
    """Give a meta model tensors of a mode, in place, so that it runs as on the CPU; tied weights stay tied.

    `half` makes the weights half precision.
    """
    empty: dict[int, Tensor] = {}
    with mode:
        for module in model.modules():
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


Loss = Callable[..., Tensor]
"""A function from a number of rows to a trainer's loss of them. Its named arguments, `checked_loss` and `clock`,
replace the trainer's own."""


def text_loss(model: Any, batch: BatchShape, precision: Precision) -> Loss:
    """Return the loss of a causal LM's hidden states at all positions."""

    def loss(rows: int, checked_loss: Any, clock: Any) -> Tensor:
        inputs = batch.labelled(rows)
        positions = LossPositions(inputs.pop("positions")[0])
        with precision_of(precision):
            hidden = last_hidden(model, **inputs)
            return checked_loss(None, (positions.take(hidden), None))  # type: ignore[no-any-return]

    return loss


def trace_forward(mode: FakeTensorMode, model: nn.Module, batch: BatchShape, precision: Precision) -> Affine:
    """Return the peak of a causal LM's forward without gradients, in bytes beyond its weights.

    `mode` is the one that the model was built in.
    """

    def trace(rows: int) -> list[Course]:
        with mode, torch.no_grad():
            inputs = batch.inputs(rows)
            with LiveBytes() as live, precision_of(precision):
                last_hidden(model.eval(), **inputs)  # type: ignore[arg-type]
                return [live.course]

    return batch.affine(lambda rows: [course.peak for course in traced_by_layers(model, partial(trace, rows))])[0]


class StandInLoss(torch.autograd.Function):
    """A stand-in for a loss of hidden states, whose gradients have their sizes."""

    @staticmethod
    def forward(ctx: Any, *hidden: Tensor) -> Tensor:
        """Return a scalar."""
        ctx.like = [states.new_empty(()).expand(states.shape) for states in hidden]
        return hidden[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return gradients, all at once."""
        return tuple(torch.zeros_like(like, memory_format=torch.contiguous_format) for like in ctx.like)


class Phases:
    """A trainer's clock that keeps the bytes of the target's forward apart from those after it."""

    def __init__(self, live: LiveBytes | None = None):
        self.live, self.teacher = live, Course(0, ())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as a phase."""
        yield
        if name == "teacher" and self.live is not None:
            self.teacher = self.live.course
            self.live.restart()


def trace_step(
    mode: FakeTensorMode, model: Any, batch: BatchShape, loss: Loss, checkpointing: bool, learns: bool = True
) -> Activations:
    """Return the bytes that a training step holds without its loss, from a forward and a backward on fake tensors.

    Args:
        mode: the mode that the model was built in.
        model: has gradients where it trains, weights in half precision for "half", and no dropout in attention, which
            would run as separate operations without a GPU.
        batch: its input.
        loss: a trainer's, with this model.
        checkpointing: whether each layer's activations are recomputed in the backward (Chen et al. 2016).
        learns: False for an evaluation, which has no backward, and always the batch's number of rows.
    """

    def trace(rows: int) -> list[Course]:
        with mode, torch.set_grad_enabled(learns):
            model.train(learns)
            if checkpointing:
                model.activation_checkpointing_enable({"use_reentrant": False})
            hold_gradients(model)
            with LiveBytes() as live:
                clock, before_loss = Phases(live), list[Course]()

                def stand_in(_: Any, *learners: Any) -> Tensor:
                    before_loss.append(live.course)
                    return StandInLoss.apply(*(states for states, _ in learners))  # type: ignore[no-any-return]

                total = loss(rows, checked_loss=stand_in, clock=clock)
                live.restart()
                if learns:
                    total.backward()
                after_loss = live.course
            if checkpointing:
                model.activation_checkpointing_disable()
            model.zero_grad()
        return [clock.teacher, *before_loss, after_loss]

    def figures(rows: int) -> list[int]:
        teacher, before, after = traced_by_layers(model, partial(trace, rows))
        return [teacher.peak, before.peak, before.end, after.start, after.peak]

    return Activations(*(batch.affine(figures) if learns else map(Affine, figures(batch.rows))))


def trace_cache(mode: FakeTensorMode, draft: PreTrainedModel, batch: BatchShape, precision: Precision) -> Affine:
    """Return the bytes of a draft's keys and values for texts of the batch's length."""

    def trace(rows: int) -> list[Course]:
        with mode, torch.no_grad():
            inputs = batch.inputs(rows)
            with LiveBytes() as live, precision_of(precision):
                decoder = decoder_of(draft.eval())
                output = decoder(**inputs, use_cache=True)
                cache = getattr(output, "past_key_values", None) or output.cache_params
                del output
                held = live.course
                del cache
        return [held]

    return batch.affine(lambda rows: [course.end for course in traced_by_layers(draft, partial(trace, rows))])[0]


def trace_loss(mode: Any, model: nn.Module, loss: Loss, learns: bool = True) -> tuple[float, float]:
    """Return the peaks of a loss, in bytes: of its forward, and of its own backward down to the hidden states.

    If `mode` does nothing, real tensors are measured. An evaluation, which does not learn, has no backward.
    """
    peaks = list[float]()

    def measured(loss_of: Callable[[Any], Tensor], *learners: Any) -> Tensor:
        leaves = [(states.detach().requires_grad_(learns), head) for states, head in learners]
        with LiveBytes() as live:
            total = loss_of(leaves)
            peaks.append(live.peak)
            live.restart()
            with torch.autocast("cpu", enabled=False):
                if learns:
                    total.backward()
        peaks.append(live.peak)
        return total.detach()

    with mode, torch.set_grad_enabled(learns):
        hold_gradients(model)
        with GroupedMaps():
            loss(1, checked_loss=measured, clock=Phases())
        model.zero_grad()
    forward, backward = peaks
    return forward, backward


def through_chunks(traced: Callable[[int], tuple[float, float]], positions: int, chunk: int) -> tuple[float, float]:
    """Return `trace_loss` for any number of positions: each chunk after the second adds as much as the third."""
    if positions <= 2 * chunk:
        return traced(positions)
    few, many = 2 * chunk, 3 * chunk
    pairs = zip(traced(few), traced(many), strict=True)
    forward, backward = (Affine.through(few, at_few, many, at_many)(positions) for at_few, at_many in pairs)
    return forward, backward


def hold_gradients(model: nn.Module) -> None:
    """Give a model the gradients that it holds at all times, to which a step adds its own."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
