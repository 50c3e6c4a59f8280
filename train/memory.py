"""What a distillation run holds in memory, reckoned without weights and without a GPU.

Weights, gradients and optimiser states are sums of tensor sizes, divided as ZeRO's stages divide them (Rajbhandari et
al. 2020, section 5). Activations follow no formula for one family: the models' own forward and backward, and our own
loss, run on tensors that have shapes and no data (`FakeTensorMode`), and every storage is counted from its allocation
to its release. So the figures have what PyTorch keeps for the backward of each operation, two copies of a norm's input
and a dropout's mask included, and follow the code when it changes.

For a GPT layer in half precision on s tokens of b rows with hidden size h, Korthikanti et al. 2022 (section 4.1) count
34·s·b·h bytes and 5·a·s²·b more for the attention matrix, which fused attention recomputes (their section 5). What is
found here is above that by what eager kernels keep besides: intermediate results of activations and norms that are
written in several operations, and with padding an additive mask of 2·b·s² bytes a layer.

Not counted: kernels' workspaces and the allocator's fragmentation, for which a plan sets an allowance aside.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from draftsmith.decode.errors import InputError
from draftsmith.train import lean
from draftsmith.train.heads import head_of, last_hidden
from draftsmith.train.objective import Objective
from draftsmith.train.teacher import CachedLaw, LiveLaw, TeacherLaw

Strategy = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]
Precision = Literal["float32", "autocast", "half"]
"""How a draft computes: in float32; from float32 weights under autocast; from half-precision copies of them."""

Placement = Literal["whole", "sharded", "8bit", "4bit", "elsewhere"]
"""How a target lies on the GPUs that train the draft."""

# DeepSpeed's stage3_max_live_parameters: weights that ZeRO-3 keeps gathered, as long as they will be used again.
LIVE_PARAMETERS = 10**9
# bitsandbytes: two bytes of state, and a float32 scale for 256 values of each; small tensors and embeddings in full.
BLOCK, SMALL = 256, 4096
ADAM = ("adamw_torch", "adamw_torch_fused", "paged_adamw", "paged_adamw_32bit", "adamw_anyprecision", "stable_adamw")
ADAM_8BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit")
LION = ("lion_32bit", "paged_lion_32bit")
OPTIMIZERS = (*ADAM, *ADAM_8BIT, *LION, "adafactor", "sgd")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations allocate, while they live, on fake tensors and on real ones."""

    def __init__(self, given: Iterable[Tensor] = ()):
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._given = list(given)
        """Not counted, and kept: a storage's number is that of another once it is released."""
        for tensor in self._given:
            self._sizes[tensor.untyped_storage()._cdata] = 0

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
class Batch:
    """What a model is fed."""

    length: int
    """Tokens of a row."""
    rows: int = 1
    """For which figures are exact. Peaks are the largest of several affine functions of the rows: between this number
    and four times as many the figures are at most too high, beyond them by little too low."""
    packed: bool = False
    """Rows have positions in place of a mask."""

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of rows that traces are taken at."""
        return self.rows, 4 * self.rows

    def affine(self, at_few: float, at_many: float) -> Affine:
        """Return what was found at `sizes`, for any number of rows."""
        few, many = self.sizes
        return Affine.through(few, at_few, many, at_many)

    def inputs(self, rows: int) -> dict[str, Tensor]:
        """Return a batch of so many rows, (B, T) each, of padded texts or packed ones."""
        ids = torch.zeros(rows, self.length, dtype=torch.long)
        return {"input_ids": ids, "position_ids" if self.packed else "attention_mask": torch.ones_like(ids)}

    def chosen(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of all positions that have a next token, (N, H), as the loss takes them."""
        places = hidden.new_zeros(len(hidden) * (self.length - 1), dtype=torch.long)
        return hidden[:, :-1][places, places]


def fake_mode() -> FakeTensorMode:
    """Return a mode in which models are built and run without data."""
    return FakeTensorMode()


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


@contextmanager
def _precision(precision: Precision) -> Iterator[None]:
    # float16 takes the same bytes. FSDP's half-precision copies run under autocast too, which changes little.
    with torch.autocast("cpu", dtype=torch.bfloat16) if precision == "autocast" else nullcontext():
        yield


def trace_forward(mode: FakeTensorMode, model: PreTrainedModel, batch: Batch, precision: Precision) -> Affine:
    """Return the most bytes beyond its weights that a model's forward takes at any time without gradients.

    Args:
        mode: that the model was built in.
        model: the target, or a draft that is evaluated.
        batch: what it is fed.
        precision: "autocast", or anything else for the weights' own.
    """
    peaks = []
    for rows in batch.sizes:
        with mode, torch.no_grad():
            inputs = batch.inputs(rows)
            with LiveBytes([*_tensors(model), *inputs.values()]) as live, _precision(precision):
                batch.chosen(last_hidden(model.eval(), **inputs))
            peaks.append(live.peak)
    return batch.affine(*peaks)


class _Loss(torch.autograd.Function):
    """Stands in for a loss: takes hidden states, and returns a gradient of their size in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.like = hidden.new_empty(()).expand(hidden.shape)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.zeros_like(ctx.like, memory_format=torch.contiguous_format)


def trace_draft(
    mode: FakeTensorMode, draft: PreTrainedModel, batch: Batch, precision: Precision, checkpointing: bool
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
    found = []
    for rows in batch.sizes:
        with mode:
            draft.train()
            if checkpointing:
                draft.activation_checkpointing_enable({"use_reentrant": False})
            # Held throughout: gradients add up in them.
            for parameter in draft.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            inputs = batch.inputs(rows)
            with LiveBytes([*_tensors(draft), *inputs.values()]) as live:
                with _precision(precision):
                    whole = last_hidden(draft, **inputs)  # the loss is taken while the forward still has it
                    hidden = batch.chosen(whole)
                    in_loss = live.now
                    total = _Loss.apply(hidden)
                    del hidden, whole
                kept = live.now
                live.restart()
                total.backward()
            backward = live.peak
            draft.activation_checkpointing_disable()
            draft.zero_grad()
            found.append((in_loss, kept, backward))
    return Activations(*(batch.affine(*pair) for pair in zip(*found, strict=True)))


def trace_cache(mode: FakeTensorMode, draft: PreTrainedModel, batch: Batch, precision: Precision) -> Affine:
    """Return the bytes of a draft's keys and values for texts as long as the batch."""
    sizes = []
    for rows in batch.sizes:
        with mode, torch.no_grad():
            inputs = batch.inputs(rows)
            with LiveBytes([*_tensors(draft), *inputs.values()]) as live, _precision(precision):
                decoder: Any = draft.eval().get_decoder()
                cache = decoder(**inputs, use_cache=True).past_key_values
                sizes.append(live.now)
                del cache
    return batch.affine(*sizes)


def trace_loss(
    mode: FakeTensorMode,
    objective: Objective,
    draft: PreTrainedModel,
    target: PreTrainedModel | None,
    positions: int,
    precision: Precision,
    k: int = 32,
) -> tuple[float, float]:
    """Return the most bytes that the loss takes in the forward, and in its own backward down to the hidden states.

    The gradients to hidden states and head are part of both, the hidden states themselves of neither.

    Args:
        mode: that the models were built in.
        objective: what is minimised.
        draft: as in `trace_draft`.
        target: in its own dtype; None for laws from a teacher cache.
        positions: that the loss is taken over.
        precision: how the draft computes.
        k: tokens of a cached law.
    """
    vocabulary = _vocab_size(draft, target)
    with mode:
        q_hidden = _hidden(draft, positions, torch.float32 if precision == "autocast" else None).requires_grad_(True)
        labels, weights = torch.zeros(positions, dtype=torch.long), torch.ones(positions, 1)
        law: TeacherLaw | None = None
        if not objective.needs_target:
            given = []
        elif target is None:
            law = CachedLaw(
                torch.zeros(positions, k, dtype=torch.int32),
                torch.zeros(positions, k).half(),
                *torch.zeros(2, positions),
            )
            given = [law.ids, law.log_p, law.log_tail]
        else:
            hidden = _hidden(target, positions)
            law = LiveLaw(hidden, head_of(target).cut(vocabulary))
            given = [*_tensors(target), hidden]
        for parameter in draft.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        with LiveBytes([*_tensors(draft), *given, q_hidden, labels, weights]) as live:
            with _precision(precision):
                head = head_of(draft).cut(vocabulary)
                total = lean.lean_sum(objective.features, weights, labels, q_hidden, head, law)[0]
            forward = live.peak
            live.restart()
            total.backward()
        draft.zero_grad()
    return float(forward), float(live.peak)


def _hidden(model: PreTrainedModel, positions: int, dtype: torch.dtype | None = None) -> Tensor:
    head = head_of(model).weight
    return torch.zeros(positions, head.shape[1], dtype=dtype or head.dtype)


def _vocab_size(*models: PreTrainedModel | None) -> int:
    return min(len(head_of(model).weight) for model in models if model is not None)


def _tensors(model: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*model.parameters(), *model.buffers(), *gradients]


@dataclass(frozen=True)
class Weights:
    """How many numbers a model has."""

    all: int
    """Parameters, tied ones once."""
    trained: int
    """Those that have gradients."""
    buffers: int
    """Bytes of tables that are no parameters."""
    largest_unit: int
    """Parameters of the largest part that FSDP gathers at a time: a layer, or untied embeddings."""
    tail: int
    """Parameters that FSDP leaves gathered: those of the head and of the final norm."""
    bucket: int
    """Numbers that DeepSpeed reduces together, twice over: what the Trainer makes of "auto" (hidden size squared)."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Weights":
        """Count a model's."""
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        ends = {id(p) for end in (embeddings, head) for p in end.parameters()}
        layers = _layers(model)
        units = [_count(layer.parameters()) for layer in layers] + [_count(embeddings.parameters())]
        inside = {id(p) for layer in layers for p in layer.parameters()} | ends
        rest = [p for p in model.parameters() if id(p) not in inside]
        return cls(
            all=_count(model.parameters()),
            trained=_count(p for p in model.parameters() if p.requires_grad),
            buffers=sum(buffer.nbytes for buffer in model.buffers()),
            largest_unit=max(units),
            tail=_count(head.parameters()) + _count(rest),
            bucket=model.config.get_text_config().hidden_size ** 2,
        )


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def target_bytes(target: PreTrainedModel, placement: Placement, gpus: int) -> dict[str, float]:
    """Return the bytes that a frozen target takes on each GPU at all times.

    * "whole": all of it, in its own dtype.
    * "sharded": a share of the decoder, two layers and the embeddings gathered while it computes, and a whole head.
    * "8bit", "4bit": linear maps but the head in a byte or half of one (Dettmers et al. 2022 and 2023, with a float32
      scale for a row, or for 64 numbers), and one of them at a time in the dtype of computing.
    * "elsewhere": on a device of its own, and a head here.

    Args:
        target: in its dtype.
        placement: as above.
        gpus: over so many it is shared.
    """
    dtype, weights = head_of(target).weight.dtype, Weights.of(target)
    if placement == "whole":
        return {f"target: weights in {dtype}, whole".replace("torch.", ""): float(weights.all * dtype.itemsize)}
    head = head_of(target).weight
    if placement == "elsewhere":
        return {"target: the head": float(head.nbytes)}
    if placement == "sharded":
        embeddings = target.get_input_embeddings().weight
        decoder = weights.all - (0 if embeddings is head else head.numel())
        layers = [_count(layer.parameters()) for layer in _layers(target)]
        gathered = 2 * max(layers) + decoder - sum(layers)
        return {
            "target: a share of the weights, the head whole": dtype.itemsize * (decoder / gpus + head.numel()),
            "target: gathered weights": float(dtype.itemsize * gathered),
        }
    linear = [
        module.weight
        for module in target.modules()
        if isinstance(module, nn.Linear | Conv1D) and module.weight is not head
    ]
    numbers, rows = _count(linear), sum(len(weight) for weight in linear)
    small = numbers + 4 * rows if placement == "8bit" else numbers / 2 + 4 * numbers / 64
    return {
        f"target: weights in {placement}, whole": small + (weights.all - numbers) * dtype.itemsize,
        "target: a matrix in the dtype of computing": float(max(map(Tensor.numel, linear)) * dtype.itemsize),
    }


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    return [module for part in model.modules() if isinstance(part, nn.ModuleList) for module in part]


def optimizer_bytes(model: PreTrainedModel, name: str) -> int:
    """Return the bytes of an optimiser's states for the parameters that train, not sharded.

    AdamW has two float32 moments and a step count for each tensor; "muon" (`MuonAdamW`) one momentum for matrices that
    are neither embeddings nor head, and AdamW's for the rest; 8-bit variants (Dettmers et al. 2022) a byte for each
    moment, with a float32 scale a block of 256, but for embeddings and small tensors.

    Args:
        model: the draft.
        name: one of `OPTIMIZERS`, as `training.optim` has it, or muon.

    Raises:
        InputError: another name.
    """
    if name not in (*OPTIMIZERS, "muon"):
        raise InputError(f"training.optim: expected one of {', '.join(OPTIMIZERS)}, found {name!r}")
    ends = {id(p) for end in (model.get_input_embeddings(), model.get_output_embeddings()) for p in end.parameters()}
    total = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        n, is_matrix = parameter.numel(), parameter.ndim == 2
        if name == "sgd":
            continue
        if name == "adafactor":
            total += 4 * (sum(parameter.shape) if is_matrix else n)
        elif name in LION or (name == "muon" and is_matrix and id(parameter) not in ends):
            total += 4 * n
        elif name in ADAM_8BIT and n >= SMALL and id(parameter) not in ends:
            total += 2 * n + 2 * 4 * -(-n // BLOCK)
        else:
            total += 8 * n + 4
    return total


def held_bytes(weights: Weights, states: int, strategy: Strategy, gpus: int, precision: Precision) -> dict[str, float]:
    """Return the bytes that a draft takes on each GPU at all times, by what they are for.

    * DDP: everything whole, and buckets of the gradients' size to send them from (`gradient_as_bucket_view` is off).
    * ZeRO (Rajbhandari et al. 2020, section 5): working weights and gradients in the precision of computing, and
      float32 weights with the states, divided over the GPUs from stage 1 on, gradients from 2 on, working weights from
      3 on.
    * FSDP2: float32 weights, gradients and states divided; two layers gathered at a time, and head and norm always.

    Args:
        weights: the draft's.
        states: `optimizer_bytes`.
        strategy: how the draft is spread.
        gpus: over so many.
        precision: how it computes.
    """
    working = 2 if precision == "half" else 4
    if strategy == "ddp":
        return {
            "draft: weights": 4 * weights.all + weights.buffers,
            "draft: gradients": 4 * weights.trained,
            "draft: DDP's buckets": 4 * weights.trained if gpus > 1 else 0,
            "draft: optimiser states": states,
        }
    if strategy == "fsdp2":
        gathered = weights.tail + 2 * weights.largest_unit if gpus > 1 else 0
        return {
            "draft: weights": 4 * weights.all / gpus + weights.buffers,
            "draft: gradients": 4 * weights.trained / gpus,
            "draft: optimiser states": states / gpus,
            "draft: gathered weights": working * gathered,
            "draft: gradients on their way": working * min(gathered, weights.trained),
        }
    stage = int(strategy[-1])
    gathered = min(weights.all, LIVE_PARAMETERS) if stage == 3 and gpus > 1 else 0
    return {
        "draft: weights": working * weights.all / (gpus if stage == 3 else 1) + weights.buffers,
        "draft: float32 weights": 4 * weights.trained / gpus,
        "draft: gradients": working * weights.trained / (gpus if stage >= 2 else 1),
        "draft: optimiser states": states / gpus,
        "draft: gathered weights": working * gathered,
        "draft: ZeRO's buckets": 2 * working * min(weights.bucket, weights.trained),
    }


@dataclass(frozen=True)
class Moment:
    """A time of a step at which memory may be at its most, and what is there besides what always is."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.parts.values())


@dataclass
class Footprint:
    """What one GPU holds, as a function of the rows of a micro batch."""

    mode: FakeTensorMode
    draft: PreTrainedModel
    target: PreTrainedModel | None
    objective: Objective
    batch: Batch
    precision: Precision
    activations: Activations
    target_forward: Affine
    """`trace_forward` of the target; zero without one in memory."""
    draft_forward: Affine
    """Likewise of the draft; looked at for evaluation only."""
    held: dict[str, float]
    """Bytes that are there at all times."""
    step: float = 0.0
    """What the optimiser takes for a moment."""
    k: int = 32
    """Tokens of a cached law."""
    cache: Affine | None = None
    """`trace_cache` of a draft that writes texts of its own."""

    def positions(self, rows: int) -> int:
        """Return the positions that the loss is taken over, all of them completion tokens in the worst case."""
        return rows * (self.batch.length - 1)

    def law_bytes(self, rows: int) -> float:
        """Return the bytes of what p is made from: the target's hidden states, or its cached laws."""
        if not self.objective.needs_target:
            return 0.0
        if self.target is None:
            return float(self.positions(rows) * (6 * self.k + 8))
        weight = head_of(self.target).weight
        return float(self.positions(rows) * weight.shape[1] * weight.element_size())

    @property
    def _chunk(self) -> int:
        """Positions of a chunk of the loss."""
        return max(1, lean.CHUNK_ENTRIES // _vocab_size(self.draft, self.target))

    @cached_property
    def _chunks(self) -> list[Affine]:
        """`trace_loss` by the number of chunks, from two on: the first is computed beside no other."""
        pairs = zip(self._traced_loss(2 * self._chunk), self._traced_loss(3 * self._chunk), strict=True)
        return [Affine.through(2, two, 3, three) for two, three in pairs]

    def _traced_loss(self, positions: int) -> tuple[float, float]:
        return trace_loss(self.mode, self.objective, self.draft, self.target, positions, self.precision, self.k)

    def loss_bytes(self, rows: int) -> tuple[float, float]:
        """Return `trace_loss` of so many rows."""
        positions = self.positions(rows)
        if positions <= 2 * self._chunk:
            return self._traced_loss(positions)
        forward, backward = (affine(positions / self._chunk) for affine in self._chunks)
        return forward, backward

    def eager_logits(self, rows: int) -> float:
        """Return what a loss on whole logits would take.

        Those of both models, their float32 log-probabilities, and the gradient to the draft's.
        """
        size = self.positions(rows) * _vocab_size(self.draft)
        own = 4 if self.precision == "float32" else 2
        theirs = head_of(self.target).weight.element_size() if self.target is not None else 0
        return float(size * (2 * own + theirs + 8))

    def moments(self, rows: int, eval_rows: int) -> list[Moment]:
        """Return the times at which memory may be at its most.

        Args:
            rows: of a micro batch.
            eval_rows: of a batch of evaluation; 0 for none.
        """
        parts, loss = self.activations, self.loss_bytes(rows)
        copies = max(0.0, parts.in_loss.constant)
        found = [
            Moment("the target's forward", {"target: activations": self.target_forward(rows)}),
            Moment(
                "the loss",
                {
                    "draft: copies of weights for autocast": copies,
                    "draft: activations": parts.in_loss(rows) - copies,
                    "p's hidden states or laws": self.law_bytes(rows),
                    "loss: logits of a chunk, gradients of head and hidden states": loss[0],
                },
            ),
            Moment(
                "the head's backward",
                {"draft: activations": parts.kept(rows), "loss: gradients of head and hidden states": loss[1]},
            ),
            Moment("the backward", {"draft: activations, one layer's backward": parts.backward(rows)}),
            Moment("the optimiser's step", {"optimiser: temporary": self.step}),
        ]
        if self.cache is not None:
            logits = 6 * 4 * rows * _vocab_size(self.draft)  # processors sort and copy
            found.append(
                Moment("sampling", {"draft: keys and values": self.cache(rows), "sampling: logits": float(logits)})
            )
        if eval_rows:
            law, evaluated = self.law_bytes(eval_rows), self.loss_bytes(eval_rows)[0]
            most = max(self.target_forward(eval_rows), law + max(self.draft_forward(eval_rows), evaluated))
            found.append(Moment("evaluation", {"both models: activations": most}))
        return found

    def peak(self, rows: int, eval_rows: int = 0) -> Moment:
        """Return the moment with the most."""
        return max(self.moments(rows, eval_rows), key=lambda moment: moment.total)

    def total(self, rows: int, eval_rows: int = 0) -> float:
        """Return the most bytes at any time."""
        return sum(self.held.values()) + self.peak(rows, eval_rows).total

    def largest(self, capacity: float, eval_rows: int = 0, limit: int = 4096) -> int:
        """Return the most rows of a micro batch that fit in so many bytes; 0 if one does not."""
        fits, over = 0, 1
        while over <= limit and self.total(over, eval_rows) <= capacity:
            fits, over = over, 2 * over
        while over - fits > 1:
            middle = (fits + over) // 2
            fits, over = (middle, over) if self.total(middle, eval_rows) <= capacity else (fits, middle)
        return fits
