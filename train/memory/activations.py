"""Activations, traced without data and without a GPU.

They follow no formula for one family: the models' forward and backward and the loss run on tensors that have shapes
and no data (`FakeTensorMode`), and every storage is counted from its allocation to its release. So the figures
have what PyTorch keeps for the backward of each operation, two copies of a norm's input and a dropout's mask included,
and follow the code when it changes. Of layers that are alike, few are run (`layers`).

For a GPT layer in half precision on s tokens of b rows with hidden size h, Korthikanti et al. 2022 (section 4.1) count
34·s·b·h bytes and 5·a·s²·b more for the attention matrix, which fused attention recomputes (their section 5). The
count here is above that: eager kernels also keep intermediate results of activations and norms that take several
operations, and with packed rows a mask of 2·b·s² bytes a layer.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
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
from draftsmith.train.memory.layers import Course, traced_by_layers, traced_whole
from draftsmith.train.memory.setting import Precision

GROUPED = torch.ops.aten._grouped_mm.default
"""The product of a mixture's experts."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations allocate, while they live, on fake tensors and on real ones.

    Attention runs by the math kernel, which holds all scores, where CUDA would.
    """

    def __init__(self, given: Iterable[Tensor] = ()):
        super().__init__()
        self.now = 0
        self.peak = 0
        """The most bytes at any time since `restart`."""
        self._start, self._turns = 0, list[int]()
        self._sizes: dict[int, int] = {}
        self._given = list(given)
        """Not counted, and kept: a storage's number is that of another once it is released."""
        for tensor in self._given:
            self._sizes[tensor.untyped_storage()._cdata] = 0
        self._kernels = CudaKernels()

    def __enter__(self) -> "LiveBytes":
        self._kernels.__enter__()
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._kernels.__exit__(*error)

    def restart(self) -> None:
        """Look for the peak from here on."""
        self.peak = self._start = self.now
        self._turns = []

    @property
    def course(self) -> Course:
        """How the bytes went since `restart`."""
        return Course(self._start, tuple(self._turns))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # fake tensors are asked for it more than for all else
            return args[0].fake_device
        if func is GROUPED and args[0].dtype != torch.bfloat16:
            # Its kernels take every dtype, and its shape function bfloat16 alone; what stands in for it is not counted.
            halves = (tensor.to(torch.bfloat16) for tensor in args[:2])
            out = func(*halves, *args[2:], **(kwargs or {})).to(args[0].dtype)
        else:
            out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes()
                    self._change(storage.nbytes())
                    weakref.finalize(storage, self._release, storage._cdata)
        return out

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
        """Return what has these values for these numbers of rows."""
        slope = (at_many - at_few) / (many - few)
        return cls(at_few - slope * few, slope)

    def __call__(self, rows: float) -> float:
        """Return the bytes at a number of rows."""
        return self.constant + self.per_row * rows


@dataclass(frozen=True)
class Activations:
    """Bytes of a drafter's step, weights and their gradients left out."""

    forward: Affine
    """The most at any time of its forward."""
    in_loss: Affine
    """While the loss is taken: what is kept for the backward, and the copies of weights that autocast made."""
    after_loss: Affine
    """After it: what is kept for the backward."""
    backward: Affine
    """The most at any time of its backward, of which `after_loss` is a part."""


@dataclass(frozen=True)
class BatchShape:
    """The shape of a model's input."""

    length: int
    """Tokens of a row."""
    rows: int = 1
    """Figures are exact for this number. Peaks are the largest of several affine functions of the rows: up to four
    times as many rows the figures are at most too high, beyond them a little too low."""
    packed: bool = False
    """Rows have positions in place of a mask."""

    @property
    def entries(self) -> int:
        """Entries of a row that a model is fed: its tokens, and what a kind of drafter puts beside them."""
        return self.length

    def affine(self, bytes_of: Callable[[int], list[int]]) -> list[Affine]:
        """Return functions of the number of rows, from the bytes at this number and at four times as many."""
        few, many = self.rows, 4 * self.rows
        return [Affine.through(few, a, many, b) for a, b in zip(bytes_of(few), bytes_of(many), strict=True)]

    def inputs(self, rows: int) -> dict[str, Tensor]:
        """Return a batch of rows, (B, T) each, of padded texts or packed ones."""
        ids = torch.zeros(rows, self.length, dtype=torch.long)
        return {"input_ids": ids} | ({"position_ids": torch.ones_like(ids)} if self.packed else {})

    def hidden(self, model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
        """Return the last hidden states of a batch, (B, L, H)."""
        return last_hidden(model, **inputs)

    def decoded(self, model: Any, inputs: dict[str, Tensor]) -> tuple[Sequence[Tensor], Tensor]:
        """Return the hidden states that the loss takes, and all of them, as a `Forward` does."""
        whole = self.hidden(model, inputs)
        return [self.chosen(whole)], whole

    def chosen(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of all positions that have a next token, (N, H), as the loss takes them."""
        places = hidden.new_zeros(len(hidden) * (self.entries - 1), dtype=torch.long)
        return hidden[:, :-1][places, places]


def shadow(mode: FakeTensorMode, model: nn.Module, half: bool = False) -> None:
    """Give a model of the meta device tensors of a mode, in place; it then runs as if it were on the CPU.

    Args:
        mode: that it is to run in.
        model: with any tensors; tied ones stay tied.
        half: make its weights half precision, whatever they were.
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


Forward = Callable[[Any, dict[str, Tensor]], tuple[Sequence[Tensor], Any]]
"""From a model and a batch to the states that the loss takes, and to whatever else is there while it is taken."""


def trace_forward(
    mode: FakeTensorMode, model: nn.Module, batch: BatchShape, precision: Precision, forward: Forward | None = None
) -> Affine:
    """Return the most bytes beyond its weights that a model's forward takes at any time without gradients.

    Args:
        mode: that the model was built in.
        model: the target, or a drafter that is evaluated.
        batch: what it is fed.
        precision: "autocast", or anything else for that of the weights.
        forward: what is run; if None the decoder of a causal LM.
    """
    run, by_layers = (batch.decoded, traced_by_layers) if forward is None else (forward, traced_whole)

    def trace(rows: int) -> list[Course]:
        with mode, torch.no_grad():
            inputs = batch.inputs(rows)
            with LiveBytes([*tensors_of(model), *inputs.values()]) as live, precision_of(precision):
                run(model.eval(), inputs)
                return [live.course]

    return batch.affine(lambda rows: [course.peak for course in by_layers(model, partial(trace, rows))])[0]


class StandInLoss(torch.autograd.Function):
    """Stands in for a loss: takes tensors of hidden states, and gives gradients of their sizes in the backward."""

    @staticmethod
    def forward(ctx: Any, *hidden: Tensor) -> Tensor:
        """Return a scalar."""
        ctx.like = [states.new_empty(()).expand(states.shape) for states in hidden]
        return hidden[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return gradients, all at once."""
        return tuple(torch.zeros_like(like, memory_format=torch.contiguous_format) for like in ctx.like)


def trace_step(
    mode: FakeTensorMode,
    model: Any,
    batch: BatchShape,
    precision: Precision,
    checkpointing: bool,
    forward: Forward | None = None,
) -> Activations:
    """Return what a training step holds, by running its forward and backward on fake tensors.

    Args:
        mode: that the model was built in.
        model: with `requires_grad` where it trains; in half precision for "half". Its attention must have no dropout:
            without a GPU that would run as separate operations.
        batch: what it is fed.
        precision: how it computes.
        checkpointing: recompute each layer's activations in the backward (Chen et al. 2016).
        forward: what is run; if None the decoder of a causal LM.
    """
    run, by_layers = (batch.decoded, traced_by_layers) if forward is None else (forward, traced_whole)

    def trace(rows: int) -> list[Course]:
        with mode:
            model.train()
            if checkpointing:
                model.activation_checkpointing_enable({"use_reentrant": False})
            hold_gradients(model)
            inputs = batch.inputs(rows)
            with LiveBytes([*tensors_of(model), *inputs.values()]) as live:
                with precision_of(precision):
                    states, beside = run(model, inputs)
                    before_loss = live.course
                    total = StandInLoss.apply(*states)
                    del states, beside
                live.restart()
                total.backward()
                after_loss = live.course
            if checkpointing:
                model.activation_checkpointing_disable()
            model.zero_grad()
        return [before_loss, after_loss]

    def figures(rows: int) -> list[int]:
        before, after = by_layers(model, partial(trace, rows))
        return [before.peak, before.end, after.start, after.peak]

    return Activations(*batch.affine(figures))


def trace_cache(mode: FakeTensorMode, draft: PreTrainedModel, batch: BatchShape, precision: Precision) -> Affine:
    """Return the bytes of a draft's keys and values for texts as long as the batch."""

    def trace(rows: int) -> list[Course]:
        with mode, torch.no_grad():
            inputs = batch.inputs(rows)
            with LiveBytes([*tensors_of(draft), *inputs.values()]) as live, precision_of(precision):
                decoder = decoder_of(draft.eval())
                cache = decoder(**inputs, use_cache=True).past_key_values
                held = live.course
                del cache
        return [held]

    return batch.affine(lambda rows: [course.end for course in traced_by_layers(draft, partial(trace, rows))])[0]


def trace_loss(
    given: Iterable[Tensor], loss: Callable[[], tuple[Tensor, Any]], precision: Precision
) -> tuple[float, float]:
    """Return the most bytes that a loss takes in the forward, and in its own backward down to the hidden states.

    Args:
        given: what is not counted.
        loss: takes it, and returns what is there besides until its backward has ended.
        precision: how the drafter computes.
    """
    with LiveBytes(given) as live:
        with precision_of(precision):
            total, _beside = loss()
        forward = live.peak
        live.restart()
        total.backward()
    return float(forward), float(live.peak)


def through_chunks(
    traced: Callable[[int], tuple[float, float]], positions: int, few: int, many: int, whole: int
) -> tuple[float, float]:
    """Return `trace_loss` at any number of positions: it grows linearly with the chunks.

    Args:
        traced: of a number of positions.
        positions: that the loss is taken over.
        few: positions of whole chunks, at which it is traced.
        many: more of them.
        whole: positions up to which it is traced as it is.
    """
    if positions <= whole:
        return traced(positions)
    pairs = zip(traced(few), traced(many), strict=True)
    forward, backward = (Affine.through(few, at_few, many, at_many)(positions) for at_few, at_many in pairs)
    return forward, backward


def hold_gradients(model: nn.Module) -> None:
    """Give a model the gradients that it holds throughout: a step's add up in them."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Return parameters, buffers and gradients."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*model.parameters(), *model.buffers(), *gradients]
