"""Activations, traced without data and without a GPU.

They follow no formula for one family: the models' forward and backward and the loss run on tensors that have shapes
and no data (`FakeTensorMode`), and every storage is counted from its allocation to its release. So the figures
have what PyTorch keeps for the backward of each operation, two copies of a norm's input and a dropout's mask included,
and follow the code when it changes.

For a GPT layer in half precision on s tokens of b rows with hidden size h, Korthikanti et al. 2022 (section 4.1) count
34·s·b·h bytes and 5·a·s²·b more for the attention matrix, which fused attention recomputes (their section 5). The
count here is above that: eager kernels also keep intermediate results of activations and norms that take several
operations, and with packed rows a mask of 2·b·s² bytes a layer.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from draftsmith.decode.cache.kernels import AsOnCuda
from draftsmith.decode.draft_models.cut_vocabulary import kept_tokens
from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.chunked import chunked_sum
from draftsmith.train.losses.cut_vocabulary import CutVocabulary
from draftsmith.train.losses.distributions import CachedDistributions, LiveDistributions, TeacherDistributions
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead, head_of, last_hidden
from draftsmith.train.memory.setting import Precision


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations allocate, while they live, on fake tensors and on real ones.

    Attention runs by the math kernel, which holds all scores, where CUDA would.
    """

    def __init__(self, given: Iterable[Tensor] = ()):
        super().__init__()
        self.now = 0
        self.peak = 0
        """The most bytes at any time since `restart`."""
        self._sizes: dict[int, int] = {}
        self._given = list(given)
        """Not counted, and kept: a storage's number is that of another once it is released."""
        for tensor in self._given:
            self._sizes[tensor.untyped_storage()._cdata] = 0
        self._kernels = AsOnCuda()

    def __enter__(self) -> "LiveBytes":
        self._kernels.__enter__()
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._kernels.__exit__(*error)

    def restart(self) -> None:
        """Look for the peak from here on."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._release, storage._cdata)
        return out

    def _release(self, number: int) -> None:
        self.now -= self._sizes.pop(number)


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
        """Return the bytes of so many rows."""
        return self.constant + self.per_row * rows


@dataclass(frozen=True)
class Activations:
    """Bytes of a draft's step, weights and their gradients left out."""

    in_loss: Affine
    """While the loss is taken: what is kept for the backward, and the copies of weights that autocast made."""
    kept: Affine
    """After it."""
    backward: Affine
    """The most at any time of the decoder's backward, of which `kept` is a part."""


@dataclass(frozen=True)
class BatchShape:
    """The shape of what a model is fed."""

    length: int
    """Tokens of a row."""
    rows: int = 1
    """Figures are exact for this number. Peaks are the largest of several affine functions of the rows: up to four
    times as many rows the figures are at most too high, beyond them a little too low."""
    packed: bool = False
    """Rows have positions in place of a mask."""

    @property
    def entries(self) -> int:
        """What a model is fed of a row: its tokens, and what a kind of drafter puts beside them."""
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
        """Return what a model's decoder makes of a batch, (B, L, H)."""
        return last_hidden(model, **inputs)

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
    made: dict[int, Tensor] = {}
    with mode:
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if id(parameter) not in made:
                    empty = torch.empty(parameter.shape, dtype=torch.bfloat16 if half else parameter.dtype)
                    made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                setattr(module, name, made[id(parameter)])
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def precision_of(precision: Precision) -> torch.autocast:
    """Return the context that a forward in a precision runs in."""
    # float16 takes the same bytes. FSDP's half-precision copies run under autocast too, which changes little.
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast")


def trace_forward(mode: FakeTensorMode, model: PreTrainedModel, batch: BatchShape, precision: Precision) -> Affine:
    """Return the most bytes beyond its weights that a model's forward takes at any time without gradients.

    Args:
        mode: that the model was built in.
        model: the target, or a draft that is evaluated.
        batch: what it is fed.
        precision: "autocast", or anything else for that of the weights.
    """

    def trace(rows: int) -> list[int]:
        with mode, torch.no_grad():
            inputs = batch.inputs(rows)
            with LiveBytes([*tensors_of(model), *inputs.values()]) as live, precision_of(precision):
                batch.chosen(batch.hidden(model.eval(), inputs))
        return [live.peak]

    return batch.affine(trace)[0]


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


def trace_draft(
    mode: FakeTensorMode, draft: PreTrainedModel, batch: BatchShape, precision: Precision, checkpointing: bool
) -> Activations:
    """Return what a draft's training step holds, by running its forward and backward on fake tensors.

    Args:
        mode: that the draft was built in.
        draft: with `requires_grad` where it trains; in half precision for "half". Its attention must have no dropout:
            without a GPU that would run as separate operations.
        batch: what it is fed.
        precision: how it computes.
        checkpointing: recompute each layer's activations in the backward (Chen et al. 2016).
    """

    def trace(rows: int) -> list[int]:
        with mode:
            draft.train()
            if checkpointing:
                draft.activation_checkpointing_enable({"use_reentrant": False})
            hold_gradients(draft)
            inputs = batch.inputs(rows)
            with LiveBytes([*tensors_of(draft), *inputs.values()]) as live:
                with precision_of(precision):
                    whole = batch.hidden(draft, inputs)  # the loss is taken while the forward still has it
                    hidden = batch.chosen(whole)
                    in_loss = live.now
                    total = StandInLoss.apply(hidden)
                    del hidden, whole
                kept = live.now
                live.restart()
                total.backward()
            draft.activation_checkpointing_disable()
            draft.zero_grad()
        return [in_loss, kept, live.peak]

    return Activations(*batch.affine(trace))


def trace_cache(mode: FakeTensorMode, draft: PreTrainedModel, batch: BatchShape, precision: Precision) -> Affine:
    """Return the bytes of a draft's keys and values for texts as long as the batch."""

    def trace(rows: int) -> list[int]:
        with mode, torch.no_grad():
            inputs = batch.inputs(rows)
            with LiveBytes([*tensors_of(draft), *inputs.values()]) as live, precision_of(precision):
                decoder: Any = draft.eval().get_decoder()
                cache = decoder(**inputs, use_cache=True).past_key_values
                held = live.now
                del cache
        return [held]

    return batch.affine(trace)[0]


def trace_loss(
    mode: FakeTensorMode,
    objective: Objective,
    draft: PreTrainedModel,
    target: PreTrainedModel | None,
    positions: int,
    precision: Precision,
    k: int = 32,
    sizes: ChunkSizes | None = None,
) -> tuple[float, float]:
    """Return the most bytes that the loss takes in the forward, and in its own backward down to the hidden states.

    The gradients to hidden states and head are part of both, the hidden states themselves of neither.

    Args:
        mode: that the models were built in.
        objective: what is minimised.
        draft: as in `trace_draft`.
        target: in its own dtype; None for distributions from a teacher cache.
        positions: that the loss is taken over.
        precision: how the draft computes.
        k: tokens of a cached distribution.
        sizes: of chunks; those of a CPU if None.
    """
    vocabulary, kept_D = common_vocabulary(draft, target), kept_tokens(draft.config)

    def learned(head: OutputHead) -> OutputHead:
        return head.cut(vocabulary) if kept_D is None else head.of(torch.arange(vocabulary))

    sizes, objective = sizes or ChunkSizes.of(torch.device("cpu")), replace(objective, partial=kept_D is not None)
    with mode:
        cut: CutVocabulary | None = None
        if kept_D is not None and target is not None:
            cut = CutVocabulary(torch.arange(vocabulary), len(head_of(target).weight))
            sizes = cut.training_sizes(sizes, objective)
        q_hidden = _hidden(draft, positions, torch.float32 if precision == "autocast" else None).requires_grad_(True)
        labels, weights = torch.zeros(positions, dtype=torch.long), torch.ones(positions, 1)
        teacher: TeacherDistributions | None = None
        if not objective.needs_target:
            given = []
        elif target is None:
            teacher = CachedDistributions(
                torch.zeros(positions, k, dtype=torch.int32),
                torch.zeros(positions, k).half(),
                *torch.zeros(2, positions),
            )
            given = [teacher.ids, teacher.log_p, teacher.log_tail]
        else:
            hidden, whole = _hidden(target, positions), head_of(target)
            live_p = LiveDistributions(hidden, learned(whole) if cut is None else cut.teacher_head(whole, objective))
            teacher = live_p if cut is None else cut.of_teacher(live_p, objective)
            given = [*tensors_of(target), hidden]
        hold_gradients(draft)
        with LiveBytes([*tensors_of(draft), *given, q_hidden, labels, weights]) as live:
            with precision_of(precision):
                head = learned(head_of(draft))
                total = chunked_sum(objective.features, weights, labels, q_hidden, head, teacher, sizes)[0]
            forward = live.peak
            live.restart()
            total.backward()
        draft.zero_grad()
    return float(forward), float(live.peak)


def common_vocabulary(*models: PreTrainedModel | None) -> int:
    """Return the number of tokens that the heads of all these models have, or propose; None is no model."""
    given = [model for model in models if model is not None]
    kept = [kept_tokens(model.config) for model in given]
    return min(len(head_of(m).weight) if kept_D is None else len(kept_D) for m, kept_D in zip(given, kept, strict=True))


def _hidden(model: PreTrainedModel, positions: int, dtype: torch.dtype | None = None) -> Tensor:
    head = head_of(model).weight
    return torch.zeros(positions, head.shape[1], dtype=dtype or head.dtype)


def hold_gradients(model: nn.Module) -> None:
    """Give a model the gradients that it holds throughout: a step's add up in them."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Return parameters, buffers and gradients."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*model.parameters(), *model.buffers(), *gradients]
