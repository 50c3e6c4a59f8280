"""Losses over a large vocabulary in bounded memory: no more than a chunk of positions has its logits at any time.

For each chunk the forward computes both models' logits, the loss, and at once the gradients to the hidden states and to
the head: the matrix products of the eager loss, no one twice, and (N, V) never held. Shape suffixes: N positions, H
hidden, V vocabulary, K features.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftsmith.train.losses.divergences import check_divergence, per_token
from draftsmith.train.losses.output_head import OutputHead
from draftsmith.train.teacher.distributions import LiveDistributions, TeacherDistributions

Features = Callable[[Any, Tensor, Tensor], Tensor]
"""(p, q_logits (N, V), labels (N,)) → (N, K), position by position: p is logits (N, V) of `LiveDistributions`, or
`CachedDistributions`."""

# Logits of a chunk, which matrix products are taken over: fewer of them would wait for the head's weight to be read.
CHUNK_ENTRIES = 2**24
# Logits of a part of a chunk, which the loss is taken over: it holds about ten tensors of this size.
PART_ENTRIES = 2**21


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
) -> Tensor:
    """Return `divergence(p_head(p_hidden), q_head(q_hidden), …)` without holding either's logits.

    Args:
        q_hidden: the draft's last hidden states, (N, H); gradients flow to them.
        q_head: the draft's head, (V, H) or a `OutputHead`; gradients flow to its weight and bias.
        p_hidden: the target's, (N, H').
        p_head: the target's, (V, H').
        name: as in `divergence`, like the other arguments.
        temperature: divides both logits.
        mask: (N,) bool, the positions that count; all if None.
        chunk_size: positions a chunk; by default so many that a chunk has 2²⁴ logits.
        beta: the mixture weight of p in `jsd`.
        alpha: how far the skewed divergences mix.
        labels: (N,), for `cross_entropy`.

    Raises:
        InputError: as `divergence`.
    """
    check_divergence(name, temperature, beta, alpha)
    q_head, p_head = (head if isinstance(head, OutputHead) else OutputHead(head) for head in (q_head, p_head))
    weights = q_hidden.new_ones(len(q_hidden), dtype=torch.float32) if mask is None else mask.float()
    weights = weights / weights.sum()

    def features(p_logits: Tensor, q_logits: Tensor, labels_: Tensor) -> Tensor:
        own = None if labels is None else labels_
        return per_token(p_logits, q_logits, name, temperature, beta, alpha, own)[:, None]

    some_labels = weights.new_zeros(len(weights), dtype=torch.long) if labels is None else labels
    teacher = LiveDistributions(p_hidden, p_head)
    return chunked_sum(features, weights[:, None], some_labels, q_hidden, q_head, teacher, chunk_size)[0]


def chunked_sum(
    features: Features,
    weights: Tensor,
    labels: Tensor,
    q_hidden: Tensor,
    q_head: OutputHead,
    teacher: TeacherDistributions | None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return Σ weights · features over positions, and the features themselves, chunk by chunk.

    Args:
        features: of laws, position by position; differentiable in q's logits.
        weights: (N, K), constants.
        labels: (N,).
        q_hidden: (N, H).
        q_head: gradients flow to `q_hidden` and to this head.
        teacher: p of the N positions; no gradients. None where the features do not look at it; they are given q's
            logits.
        chunk_size: positions a chunk.

    Returns:
        The sum, a float32 scalar that can be differentiated once, and the features, (N, K), without gradients.
    """
    size = chunk_size or max(1, CHUNK_ENTRIES // len(q_head.weight))
    return _ChunkedSum.apply(features, weights, labels, q_hidden, q_head.weight, q_head.bias, q_head, teacher, size)


@torch.no_grad()
def chunked_features(
    features: Features,
    labels: Tensor,
    q_hidden: Tensor,
    q_head: OutputHead,
    teacher: TeacherDistributions | None,
    chunk_size: int | None = None,
) -> Tensor:
    """Return the features of all positions, (N, K), without gradients."""
    size = chunk_size or max(1, CHUNK_ENTRIES // len(q_head.weight))
    kept = []
    for at in chunks(len(q_hidden), size):
        p_of = None if teacher is None else teacher.chunk(at)
        q_raw, own = q_head.project(q_hidden[at]), labels[at]
        for part in parts(q_raw):
            p = p_of(part) if p_of else q_raw[part]
            kept.append(features(p, q_head.finish(q_raw[part]), own[part]))
    return torch.cat(kept)


def chunks(count: int, size: int) -> list[slice]:
    """Return the slices of so many positions each; one, which is empty, of none."""
    return [slice(start, start + size) for start in range(0, max(count, 1), size)]


def parts(logits: Tensor) -> list[slice]:
    """Return the slices of a chunk's logits, (N, V), that a loss is taken over."""
    return chunks(len(logits), max(1, PART_ENTRIES // logits.shape[1]))


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Features,
        weights: Tensor,
        labels: Tensor,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: OutputHead,
        teacher: TeacherDistributions | None,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        # What autocast would do to the matrix products, done by hand: it leaves products into a buffer alone.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        w, h_all = weight.to(dtype), hidden.to(dtype)
        b = None if bias is None else bias.to(dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[3:6]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if needs_bias and bias is not None else None
        total, kept = weights.new_zeros(()), []
        for at in chunks(len(hidden), size):
            p_of = None if teacher is None else teacher.chunk(at)
            with torch.autocast(device, enabled=False):
                h = h_all[at]
                g = torch.nn.functional.linear(h, w, b)  # the logits, until the loss has been through them
                for part in parts(g):
                    with torch.enable_grad():
                        raw = g[part].requires_grad_(True)
                        logits = head.finish(raw)
                        p = p_of(part) if p_of else raw.detach()
                        values = features(p, logits, labels[at][part])
                        loss = (values * weights[at][part]).sum()
                    total += loss.detach()
                    kept.append(values.detach())
                    if any(ctx.needs_input_grad):
                        g[part] = torch.autograd.grad(loss, raw)[0]
                    del raw, logits, p, values, loss
                if grad_hidden is not None:
                    grad_hidden[at] = g @ w
                if grad_weight is not None:
                    if grad_weight.dtype == dtype:
                        torch.addmm(grad_weight, g.T, h, out=grad_weight)
                    else:
                        grad_weight += g.T @ h
                if grad_bias is not None:
                    grad_bias += g.sum(0)
        ctx.gradients = (grad_hidden, grad_weight, grad_bias)
        out = torch.cat(kept)
        ctx.mark_non_differentiable(out)
        return total, out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        outer = grads[0]
        if ctx.gradients is None:
            raise RuntimeError("the loss was differentiated already, and its gradients were handed over")
        # In place: a copy of the head's gradient would be the largest tensor of all.
        found = [None if g is None else g.mul_(outer) for g in ctx.gradients]
        ctx.gradients = None
        return (None, None, None, *found, None, None, None)
