"""Losses over a large vocabulary in bounded memory: only one chunk of positions has its logits at a time.

For each chunk the forward computes both models' logits, the loss, and at once the gradients to the hidden states and
the head. It takes the same matrix products as the eager loss, each once, and never holds all logits.

A training loss runs like this: the trainer's `compute_loss` calls the model with `inside=…` (see `open_forward`), which
calls `chunked_objective`; `_ChunkedSum` walks the chunks, and `Objective.features` compares p and q.

Shape suffixes: N positions, H hidden, R input of a side map, V vocabulary, K features; C positions of a chunk, P of
a part (`ChunkSizes`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.train.losses.distributions import LiveDistributions, TeacherDistributions
from draftsmith.train.losses.divergences import check_divergence, per_token
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead

PARTS = 8  # parts per chunk on a CPU: a part that fits its cache is read faster, and a launch costs next to nothing


@dataclass(frozen=True)
class ChunkSizes:
    """The chunk sizes of a loss, or of another walk over the logits of many positions."""

    chunk: int  # logits of a chunk, the unit of the matrix products: with fewer they would wait for the head's weight
    part: int  # logits of a part of a chunk, the unit of the loss, which holds about ten float32 tensors of this size

    @classmethod
    def of(cls, device: torch.device, logits: int | None = None) -> "ChunkSizes":
        """Return the sizes for a device, with chunks of `logits` if given."""
        if device.type == "cuda":
            return cls.on_gpu(torch.cuda.get_device_properties(device).total_memory, logits)
        return ON_CPU if logits is None else cls(logits, max(1, logits // PARTS))

    @classmethod
    def on_gpu(cls, memory: float, logits: int | None = None) -> "ChunkSizes":
        """Return the sizes for a GPU with `memory` bytes: one part per chunk.

        A kernel launch takes some microseconds, in which an H100 computes 10⁷ logits. So chunks are as large as memory
        allows: a chunk's ten tensors take a fifteenth of it. For 80 GiB: 2²⁷ logits, 880 positions of 152k tokens.
        """
        size = 2 ** (int(memory / 512).bit_length() - 1) if logits is None else logits
        return cls(size, size)

    def chunks(self, count: int, vocab_size: int) -> list[slice]:
        """Return the chunks of `count` positions, as slices."""
        return slices(count, self.chunk // vocab_size)

    def parts(self, count: int, vocab_size: int) -> list[slice]:
        """Return the parts of a chunk of `count` positions, as slices."""
        return slices(count, self.part // vocab_size)


ON_CPU = ChunkSizes(2**24, 2**24 // PARTS)


def slices(count: int, size: int) -> list[slice]:
    """Return slices of `size` (at least 1) over `count`, or one empty slice if `count` is 0."""
    size = max(1, size)
    return [slice(start, start + size) for start in range(0, max(count, 1), size)]


Features = Callable[[Any, Tensor, Tensor], Tensor]
"""(p, q_logits_PV, labels_P) → features_PK, position by position. p is logits_PV from `LiveDistributions`, or
`CachedDistributions`."""


def lean_divergence(
    q_hidden: Tensor,
    q_head: Tensor | OutputHead,
    p_hidden: Tensor,
    p_head: Tensor | OutputHead,
    name: str = "forward_kl",
    temperature: float = 1.0,
    mask: Tensor | None = None,
    chunk_size: int | None = None,
    beta: float = 0.5,
    alpha: float = 0.1,
    labels: Tensor | None = None,
    eta: float = 3.0,
) -> Tensor:
    """Return `divergence(p_head(p_hidden), q_head(q_hidden), …)` without holding either model's logits.

    `q_hidden` (N, H) and `p_hidden` (N, H') are last hidden states. The heads are weights, (V, H) and (V, H'), or
    `OutputHead`s. Gradients flow to `q_hidden` and to q's head. A chunk has `chunk_size` positions; if None,
    `ChunkSizes` fits it to the device. The other arguments and errors are those of `divergence`.
    """
    check_divergence(name, temperature, beta, alpha, eta)
    q_head, p_head = (head if isinstance(head, OutputHead) else OutputHead(head) for head in (q_head, p_head))
    weights_N = q_hidden.new_ones(len(q_hidden), dtype=torch.float32) if mask is None else mask.float()
    weights_N = weights_N / weights_N.sum()

    def features(p_logits_PV: Tensor, q_logits_PV: Tensor, labels_P: Tensor) -> Tensor:
        text = None if labels is None else labels_P
        return per_token(p_logits_PV, q_logits_PV, name, temperature, beta, alpha, text, eta)[:, None]

    labels_N = weights_N.new_zeros(len(weights_N), dtype=torch.long) if labels is None else labels
    teacher, sizes = LiveDistributions(p_hidden, p_head), ChunkSizes.of(q_hidden.device)
    if chunk_size is not None:
        sizes = replace(sizes, chunk=chunk_size * len(q_head.weight))
    return chunked_sum(features, weights_N[:, None], labels_N, q_hidden, q_head, teacher, sizes)[0]


def chunked_objective(
    objective: Objective,
    hidden_NH: Tensor,
    head: OutputHead,
    teacher: TeacherDistributions | None,
    labels_N: Tensor,
    sizes: ChunkSizes | None = None,
) -> Tensor:
    """Return an objective, summed over positions: the loss that training minimises.

    Gradients flow to `hidden_NH` and to the head, which is cut to the tokens. `teacher` is None for an objective that
    needs no target.
    """
    weights_N1 = hidden_NH.new_ones(len(hidden_NH), 1, dtype=torch.float32)
    return chunked_sum(objective.features, weights_N1, labels_N, hidden_NH, head, teacher, sizes)[0]


def chunked_objectives(
    objective: Objective,
    labels_N: Tensor,
    learners: Sequence[tuple[Tensor, OutputHead, Tensor, float]],
    teacher: TeacherDistributions | None,
    sizes: ChunkSizes | None = None,
) -> Tensor:
    """Return the weighted sum of an objective over several heads that learn from the same p and labels.

    A learner is its hidden states (N, H), its head (several may share one), the mask of the positions that count, (N,)
    of 0 and 1, and the weight of its sum. `teacher` is None for an objective that needs no target.
    """
    weighted = [(states_NH, head, weight * counts_N[:, None]) for states_NH, head, counts_N, weight in learners]
    return _chunked(objective.features, labels_N, weighted, teacher, sizes)[0]


def chunked_sum(
    features: Features,
    weights_NK: Tensor | None,
    labels_N: Tensor,
    hidden_NH: Tensor,
    head: OutputHead,
    teacher: TeacherDistributions | None,
    sizes: ChunkSizes | None = None,
) -> tuple[Tensor, Tensor]:
    """Return Σ weights · features over positions, and the features themselves, chunk by chunk.

    The sum is a float32 scalar that can be differentiated once, to `hidden_NH` and the head; the features, (N, K), have
    no gradients. `features` must be differentiable in q's logits, position by position. The weights are constants, None
    if nobody needs the sum. Without a teacher `features` gets q's logits in place of p, and must ignore them.
    """
    return _chunked(features, labels_N, [(hidden_NH, head, weights_NK)], teacher, sizes)


def chunked_features(
    features: Features,
    labels_N: Tensor,
    hidden_NH: Tensor,
    head: OutputHead,
    teacher: TeacherDistributions | None,
    sizes: ChunkSizes | None = None,
) -> Tensor:
    """Return the features of all positions, (N, K), without gradients; arguments as in `chunked_sum`."""
    return chunked_sum(features, None, labels_N, hidden_NH.detach(), head.detach(), teacher, sizes)[1]


class _Learner(NamedTuple):
    """A head of a chunked sum; the int fields are indices into the sum's tensors, those that may get gradients."""

    head: OutputHead
    weights_NK: Tensor | None
    states: int  # the head's input, (N, H) or (N, H + R)
    weight: int
    bias: int | None
    side_weight: int | None

    def maps(self, tensors: Sequence[Tensor], *rows: Tensor | None) -> list[tuple[Any, ...]]:
        """Return for each linear map the index of its weight, and its columns of each of `rows`, (C, H + R)."""
        if self.side_weight is None:
            return [(self.weight, *rows)]
        at = [tensors[self.weight].shape[1]]
        parts = [(None, None) if row is None else row.tensor_split(at, dim=1) for row in rows]
        return [
            (index, *part)
            for index, part in zip((self.weight, self.side_weight), zip(*parts, strict=True), strict=True)
        ]


def _chunked(
    features: Features,
    labels_N: Tensor,
    learners: Sequence[tuple[Tensor, OutputHead, Tensor | None]],
    teacher: TeacherDistributions | None,
    sizes: ChunkSizes | None,
) -> tuple[Tensor, Tensor]:
    """Return the sum over all learners, and the first one's features."""
    tensors = list[Tensor]()

    # A tensor that several learners share enters once, so that autograd gets one gradient for it.
    def share(tensor: Tensor) -> int:
        for index, other in enumerate(tensors):
            if other is tensor:
                return index
        tensors.append(tensor)
        return len(tensors) - 1

    def optional(tensor: Tensor | None) -> int | None:
        return None if tensor is None else share(tensor)

    placed = [
        _Learner(head, weights_NK, share(states), share(head.weight), optional(head.bias), optional(head.side_weight))
        for states, head, weights_NK in learners
    ]
    sizes = sizes or ChunkSizes.of(labels_N.device)
    return _ChunkedSum.apply(features, placed, labels_N, teacher, sizes, *tensors)


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Features,
        learners: Sequence[_Learner],
        labels_N: Tensor,
        teacher: TeacherDistributions | None,
        sizes: ChunkSizes,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute the sum and its gradients together."""
        first = learners[0]
        head_dtype, device = tensors[first.weight].dtype, tensors[first.states].device.type
        # Cast by hand as autocast would: autocast skips products that are written into a buffer.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head_dtype
        operands = [tensor.to(dtype) for tensor in tensors]
        # Gradients of weights add up over chunks in float32: half precision would lose small terms of a long sum.
        # Each position is in one chunk only, so gradients of states keep their own dtype.
        wide_dtype, states = torch.promote_types(head_dtype, torch.float32), {learner.states for learner in learners}
        gradients = [
            torch.zeros(tensor.shape, dtype=tensor.dtype if index in states else wide_dtype, device=tensor.device)
            if needed
            else None
            for index, (tensor, needed) in enumerate(zip(tensors, ctx.needs_input_grad[5:], strict=True))
        ]
        learns = any(ctx.needs_input_grad[5:])
        total, first_features = tensors[first.states].new_zeros((), dtype=torch.float32), list[Tensor]()
        vocab_size = len(tensors[first.weight])
        for at in sizes.chunks(len(labels_N), vocab_size):
            p_of = None if teacher is None else teacher.chunk(at)
            for learner in learners:
                with torch.autocast(device, enabled=False):
                    states_gradient = gradients[learner.states]
                    maps = learner.maps(
                        tensors, operands[learner.states][at], None if states_gradient is None else states_gradient[at]
                    )
                    b_V = None if learner.bias is None else operands[learner.bias]
                    # This buffer holds the logits first; the loop over parts overwrites them with their gradients.
                    g_CV = torch.nn.functional.linear(maps[0][1], operands[learner.weight], b_V)
                    for index, h_CR, _ in maps[1:]:
                        g_CV.addmm_(h_CR, operands[index].T)
                    for part in sizes.parts(len(g_CV), vocab_size):
                        with torch.set_grad_enabled(learns):
                            # A leaf: autograd sees the loss of this part alone, not the matrix product before it.
                            raw_PV = g_CV[part].requires_grad_(learns)
                            logits_PV = learner.head.finish(raw_PV)
                            p = p_of(part) if p_of else raw_PV.detach()
                            values_PK = features(p, logits_PV, labels_N[at][part])
                            weights_NK = learner.weights_NK
                            loss = None if weights_NK is None else (values_PK * weights_NK[at][part]).sum()
                        if learner is first:
                            first_features.append(values_PK.detach())
                        if loss is not None:
                            total += loss.detach()
                            if learns:
                                g_CV[part] = torch.autograd.grad(loss, raw_PV)[0]
                        # Without this they would keep the part's graph alive while the next part is computed.
                        del raw_PV, logits_PV, p, values_PK, loss
                    # The backward of the linear maps, by hand: G W to the states, Gᵀ H to the weights.
                    for index, h_CH, chunk_gradient in maps:
                        if chunk_gradient is not None:
                            chunk_gradient += g_CV @ operands[index]
                        if (weight_gradient := gradients[index]) is None:
                            continue
                        if weight_gradient.dtype == dtype:  # add in place: no second tensor of the weight's size
                            torch.addmm(weight_gradient, g_CV.T, h_CH, out=weight_gradient)
                        else:
                            weight_gradient += g_CV.T @ h_CH
                    if learner.bias is not None and (bias_gradient := gradients[learner.bias]) is not None:
                        bias_gradient += g_CV.sum(0)
                    del g_CV
        ctx.gradients = [
            None if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(gradients, tensors, strict=True)
        ]
        features_NK = torch.cat(first_features)
        ctx.mark_non_differentiable(features_NK)
        return total, features_NK

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of `forward`, times the gradient of the sum."""
        outer = grads[0]
        if ctx.gradients is None:
            raise RuntimeError("the loss was differentiated already, and its gradients were handed over")
        # In place: a copy of the head's gradient would be the largest tensor of all.
        gradients = [None if g is None else g.mul_(outer) for g in ctx.gradients]
        ctx.gradients = None
        return (None, None, None, None, None, *gradients)
