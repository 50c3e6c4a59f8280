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
from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.cut_vocabulary import LossVocabulary
from draftsmith.train.losses.distributions import CachedDistributions, LiveDistributions, TeacherDistributions
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.memory.layers import Course, traced_by_layers, traced_whole
from draftsmith.train.memory.setting import Precision

GROUPED = torch.ops.aten._grouped_mm.default
"""The product of a mixture's experts."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of living storages that operations allocate, on fake tensors or real ones.

    Where CUDA would run attention by the math kernel, which holds all scores, so does this.
    """

    def __init__(self, given: Iterable[Tensor] = ()):
        super().__init__()
        self.now = 0
        self.peak = 0
        """The most bytes since `restart`."""
        self._start, self._turns = 0, list[int]()
        self._sizes: dict[int, int] = {}
        self._given = list(given)
        """Tensors that are not counted; held, since a released storage's number is used again."""
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
        if func is GROUPED and args[0].dtype != torch.bfloat16:
            # Its kernels take every dtype, but its shape function only bfloat16; the stand-ins are not counted.
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
        """Return the function through two values."""
        slope = (at_many - at_few) / (many - few)
        return cls(at_few - slope * few, slope)

    def __call__(self, rows: float) -> float:
        """Return the bytes for a number of rows."""
        return self.constant + self.per_row * rows


@dataclass(frozen=True)
class Activations:
    """The bytes of a drafter's step, without weights and their gradients."""

    forward: Affine  # the peak of its forward
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

    @property
    def entries(self) -> int:
        """The entries of a row that a model reads: its tokens, and what a kind of drafter adds to them."""
        return self.length

    def affine(self, bytes_of: Callable[[int], list[int]]) -> list[Affine]:
        """Return functions of the number of rows, from the bytes at `rows` and at four times `rows`."""
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
        """Return the hidden states that the loss reads, and all of them: a `Forward`."""
        whole = self.hidden(model, inputs)
        return [self.chosen(whole)], whole

    def chosen(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of all positions that have a next token, (N, H), as the loss reads them."""
        places = hidden.new_zeros(len(hidden) * (self.entries - 1), dtype=torch.long)
        return hidden[:, :-1][places, places]


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


Forward = Callable[[Any, dict[str, Tensor]], tuple[Sequence[Tensor], Any]]
"""A function from a model and a batch to the states that the loss reads, and to all else that lives as long."""


def trace_forward(
    mode: FakeTensorMode, model: nn.Module, batch: BatchShape, precision: Precision, forward: Forward | None = None
) -> Affine:
    """Return the peak of a model's forward without gradients, in bytes beyond its weights.

    `mode` is the one that the model was built in; `forward` is by default that of a causal LM's decoder.
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


def trace_step(
    mode: FakeTensorMode,
    model: Any,
    batch: BatchShape,
    precision: Precision,
    checkpointing: bool,
    forward: Forward | None = None,
) -> Activations:
    """Return the bytes that a training step holds, from a forward and a backward on fake tensors.

    Args:
        mode: the mode that the model was built in.
        model: has gradients where it trains, weights in half precision for "half", and no dropout in attention, which
            would run as separate operations without a GPU.
        batch: its input.
        precision: how it computes.
        checkpointing: whether each layer's activations are recomputed in the backward (Chen et al. 2016).
        forward: by default that of a causal LM's decoder.
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
                    states, rest = run(model, inputs)
                    before_loss = live.course
                    total = StandInLoss.apply(*states)
                    del states, rest
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
    """Return the bytes of a draft's keys and values for texts of the batch's length."""

    def trace(rows: int) -> list[Course]:
        with mode, torch.no_grad():
            inputs = batch.inputs(rows)
            with LiveBytes([*tensors_of(draft), *inputs.values()]) as live, precision_of(precision):
                decoder = decoder_of(draft.eval())
                output = decoder(**inputs, use_cache=True)
                cache = getattr(output, "past_key_values", None) or output.cache_params
                del output
                held = live.course
                del cache
        return [held]

    return batch.affine(lambda rows: [course.end for course in traced_by_layers(draft, partial(trace, rows))])[0]


Loss = Callable[[Tensor, TeacherDistributions | None, ChunkSizes], tuple[Tensor, Any]]
"""A function from labels (N,), p and chunk sizes to a loss, and to all else that lives until its backward ends."""


def trace_loss(
    mode: Any,
    model: nn.Module,
    vocabulary: LossVocabulary,
    teacher: LiveDistributions | CachedDistributions | None,
    positions: int,
    precision: Precision,
    sizes: ChunkSizes,
    loss: Loss,
    given: Sequence[Tensor],
) -> tuple[float, float]:
    """Return the peaks of a loss, in bytes: of its forward, and of its own backward down to the hidden states.

    The model's tensors and those `given` are not counted. If `mode` does nothing, real tensors are measured.
    """
    with mode:
        labels = torch.zeros(positions, dtype=torch.long)
        hold_gradients(model)
        with LiveBytes([*tensors_of(model), *given, labels]) as live:
            with precision_of(precision):
                wanted = teacher if vocabulary.objective.needs_target else None
                p = None if wanted is None else vocabulary.distributions(wanted)
                total, _held = loss(vocabulary.labels(labels), p, vocabulary.sizes(sizes))
                del p
            forward = live.peak
            live.restart()
            total.backward()
        model.zero_grad()
    return float(forward), float(live.peak)


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


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Return parameters, buffers and gradients."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*model.parameters(), *model.buffers(), *gradients]
