"""Losses over a large vocabulary in bounded memory: no more than a chunk of positions has its logits at any time.

For each chunk the forward computes both models' logits, the loss, and at once the gradients to the hidden states and to
the head. These are the matrix products of the eager loss, none taken twice, and no tensor is as large as all logits.

The way of a training loss: the trainer's `compute_loss` calls the model with `inside=…` (`inside_forward`), there
`chunked_objective` is called, `_ChunkedSum` walks the chunks, and `Objective.features` compares p and q.

Shape suffixes: N positions, H hidden, V vocabulary, K features of a position; of a chunk C positions, of a part P.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.distributions import LiveDistributions, TeacherDistributions
from draftsmith.train.losses.divergences import check_divergence, per_token
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead

Features = Callable[[Any, Tensor, Tensor], Tensor]
"""(p, q_logits_PV, labels_P) → features_PK, position by position: p is logits_PV of `LiveDistributions`, or
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
    """Return `divergence(p_head(p_hidden), q_head(q_hidden), …)` without holding either's logits.

    Args:
        q_hidden: the draft's last hidden states, (N, H); gradients flow to them.
        q_head: the draft's head, (V, H) or an `OutputHead`; gradients flow to its weight and bias.
        p_hidden: the target's, (N, H').
        p_head: the target's, (V, H').
        name: as in `divergence`, like the other arguments.
        temperature: divides both logits.
        mask: (N,) bool, the positions that count; all if None.
        chunk_size: positions a chunk; by default as many as suit the device (`ChunkSizes`).
        beta: the mixture weight of p in `jsd`.
        alpha: how far the skewed divergences mix.
        labels: (N,), for `cross_entropy`.
        eta: η of `lk_hybrid`.

    Raises:
        InputError: as `divergence`.
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
    follows_N: Tensor | None = None,
    weight: float = 1.0,
    sizes: ChunkSizes | None = None,
    weights_N: Tensor | None = None,
    starts_N: Tensor | None = None,
) -> Tensor:
    """Return an objective, summed over positions and times a weight: what training minimises.

    Args:
        objective: what to sum.
        hidden_NH: what the head sees in training; gradients flow to it and to the head.
        head: cut to the tokens.
        teacher: p of the positions; None for an objective that does not look at it.
        labels_N: the text's tokens.
        follows_N: bool, as in `Objective.shortfall`.
        weight: multiplies each position.
        sizes: of chunks; those that suit the device if None.
        weights_N: as in `Objective.shortfall`.
        starts_N: likewise.
    """
    args = (labels_N, hidden_NH, head, teacher, sizes)
    if not objective.couples:
        weights_N1 = torch.full((len(hidden_NH), 1), weight, device=hidden_NH.device)
        if weights_N is not None:
            weights_N1 = weights_N1 * weights_N[:, None]
        return chunked_sum(objective.features, weights_N1, *args)[0]
    total, weights_NK = _coupled(objective, chunked_features(objective.features, *args), follows_N, weights_N, starts_N)
    return _valued(chunked_sum(objective.features, weight * weights_NK, *args)[0], weight * total)


def chunked_objectives(
    objective: Objective,
    labels_N: Tensor,
    learners: Sequence[tuple[Tensor, OutputHead, Tensor, float]],
    teacher: TeacherDistributions | None,
    sizes: ChunkSizes | None = None,
) -> Tensor:
    """Return the weighted sum of an objective without blocks over several heads that learn from the same p.

    Args:
        objective: what each head minimises.
        labels_N: the text's tokens, the same for all.
        learners: of each what it sees, (N, H), its head, which may be another's too, what each position counts, (N,)
            of 0 and 1, and the weight of its sum.
        teacher: p of the N positions; None for an objective that does not look at it.
        sizes: of chunks; those that suit the device if None.
    """
    values, weighted = list[Tensor](), list[tuple[Tensor, OutputHead, Tensor]]()
    for seen_NH, head, counts_N, weight in learners:
        weights_NK = counts_N[:, None]
        if objective.couples:
            features_NK = chunked_features(objective.features, labels_N, seen_NH, head, teacher, sizes)
            total, weights_NK = _coupled(objective, features_NK, counts_N=counts_N)
            values.append(weight * total)
        weighted.append((seen_NH, head, weight * weights_NK))
    linear = chunked_sums(objective.features, labels_N, weighted, teacher, sizes)
    return _valued(linear, torch.stack(values).sum()) if values else linear


def _coupled(
    objective: Objective,
    features_NK: Tensor,
    follows_N: Tensor | None = None,
    counts_N: Tensor | None = None,
    starts_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return an objective's value, and its gradient to the features: positions weigh each other's gradients.

    So all values come first, then the gradients to what is learned, with these weights.
    """
    with torch.enable_grad():
        total = objective.shortfall(features_NK.requires_grad_(True), follows_N, counts_N, starts_N)
        (weights_NK,) = torch.autograd.grad(total, features_NK)
    return total.detach(), weights_NK


def _valued(linear: Tensor, value: Tensor) -> Tensor:
    """Return a sum that has the gradients of one and the value of the other."""
    return linear - linear.detach() + value


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

    Args:
        features: of two distributions, position by position; differentiable in q's logits.
        weights_NK: constants; None for a sum that nobody needs.
        labels_N: the text's tokens.
        hidden_NH: what q's head sees; gradients flow to it.
        head: q's; gradients flow to its weight and bias.
        teacher: p of the N positions; no gradients. None where the features do not look at it; they are given q's
            logits.
        sizes: of chunks; those that suit the device if None.

    Returns:
        The sum, a float32 scalar that can be differentiated once, and the features, (N, K), without gradients.
    """
    return _chunked(features, labels_N, [(hidden_NH, head, weights_NK)], teacher, sizes)


def chunked_sums(
    features: Features,
    labels_N: Tensor,
    learners: Sequence[tuple[Tensor, OutputHead, Tensor]],
    teacher: TeacherDistributions | None,
    sizes: ChunkSizes | None = None,
) -> Tensor:
    """Return `chunked_sum` over several heads that learn from the same p, which is made once for all of them.

    Args:
        features: as there.
        labels_N: the text's tokens, the same for all.
        learners: of each what it sees, (N, H), its head, which may be another's too, and constant weights, (N, K), 0
            where it does not learn.
        teacher: p of the N positions; None as there.
        sizes: of chunks.
    """
    return _chunked(features, labels_N, learners, teacher, sizes)[0]


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
    """A head of a chunked sum. What gradients flow to is named by its place among the sum's tensors."""

    head: OutputHead
    weights_NK: Tensor | None
    seen: int
    """What the head sees, (N, H), or (N, H + R)."""
    weight: int
    bias: int | None
    beside: int | None

    def maps(self, tensors: Sequence[Tensor], *rows: Tensor | None) -> list[tuple[Any, ...]]:
        """Return the place of each linear map that is added, and of rows (C, H + R) the columns that it sees."""
        if self.beside is None:
            return [(self.weight, *rows)]
        at = [tensors[self.weight].shape[1]]
        parts = [(None, None) if row is None else row.tensor_split(at, dim=1) for row in rows]
        return [
            (place, *part) for place, part in zip((self.weight, self.beside), zip(*parts, strict=True), strict=True)
        ]


def _chunked(
    features: Features,
    labels_N: Tensor,
    learners: Sequence[tuple[Tensor, OutputHead, Tensor | None]],
    teacher: TeacherDistributions | None,
    sizes: ChunkSizes | None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of all learners, and the first one's features; a tensor that several share is handed over once."""
    tensors = list[Tensor]()

    def place(tensor: Tensor) -> int:
        found = next((at for at, other in enumerate(tensors) if other is tensor), None)
        if found is None:
            tensors.append(tensor)
        return len(tensors) - 1 if found is None else found

    def optional(tensor: Tensor | None) -> int | None:
        return None if tensor is None else place(tensor)

    placed = [
        _Learner(head, weights_NK, place(seen), place(head.weight), optional(head.bias), optional(head.beside))
        for seen, head, weights_NK in learners
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
        """Compute the sum and its gradients together; `chunked_sum` and `chunked_sums` say what the arguments are."""
        first = learners[0]
        head_dtype, device = tensors[first.weight].dtype, tensors[first.seen].device.type
        # What autocast would do to the matrix products, done by hand: it leaves products into a buffer alone.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head_dtype
        operands = [tensor.to(dtype) for tensor in tensors]
        # Chunks add up in float32: in half precision a gradient loses what each adds to the sum of many.
        wide, states = torch.promote_types(head_dtype, torch.float32), {learner.seen for learner in learners}
        gradients = [
            torch.zeros(tensor.shape, dtype=tensor.dtype if at in states else wide, device=tensor.device)
            if needed
            else None
            for at, (tensor, needed) in enumerate(zip(tensors, ctx.needs_input_grad[5:], strict=True))
        ]
        learns = any(ctx.needs_input_grad[5:])
        total, first_features = tensors[first.seen].new_zeros((), dtype=torch.float32), list[Tensor]()
        vocab_size = len(tensors[first.weight])
        for at in sizes.chunks(len(labels_N), vocab_size):
            p_of = None if teacher is None else teacher.chunk(at)
            for learner in learners:
                with torch.autocast(device, enabled=False):
                    of_states = gradients[learner.seen]
                    maps = learner.maps(
                        tensors, operands[learner.seen][at], None if of_states is None else of_states[at]
                    )
                    b_V = None if learner.bias is None else operands[learner.bias]
                    # The logits, until the loss has been through.
                    g_CV = torch.nn.functional.linear(maps[0][1], operands[learner.weight], b_V)
                    for place, h_CR, _ in maps[1:]:
                        g_CV.addmm_(h_CR, operands[place].T)
                    for part in sizes.parts(len(g_CV), vocab_size):
                        with torch.set_grad_enabled(learns):
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
                        del raw_PV, logits_PV, p, values_PK, loss
                    for place, h_CH, of_chunk in maps:
                        if of_chunk is not None:
                            of_chunk += g_CV @ operands[place]
                        if (of_weight := gradients[place]) is None:
                            continue
                        if of_weight.dtype == dtype:
                            torch.addmm(of_weight, g_CV.T, h_CH, out=of_weight)
                        else:
                            of_weight += g_CV.T @ h_CH
                    if learner.bias is not None and (of_bias := gradients[learner.bias]) is not None:
                        of_bias += g_CV.sum(0)
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
        """Hand the gradients over, times the gradient of the sum."""
        outer = grads[0]
        if ctx.gradients is None:
            raise RuntimeError("the loss was differentiated already, and its gradients were handed over")
        # In place: a copy of the head's gradient would be the largest tensor of all.
        gradients = [None if g is None else g.mul_(outer) for g in ctx.gradients]
        ctx.gradients = None
        return (None, None, None, None, None, *gradients)
