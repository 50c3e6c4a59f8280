"""Acceptance rules, as pure functions of tensors.

p is the target's distribution and q the drafter's, both after the same warping. Row 0 of p follows the root, the text's
last token, and row i + 1 follows node i of the draft's tree. Shape suffixes: K drafted tokens, V vocabulary.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftsmith.decode.sampling import draw, draw_rows
from draftsmith.decode.tree import ROOT, Tree

Floats = npt.NDArray[np.floating[Any]]
Value = TypeVar("Value", covariant=True)


class ByNode(Protocol[Value]):
    """Values of the root and the nodes of a draft: a list, rows of a tensor (K + 1, V), or lazy ones computed once."""

    def __getitem__(self, index: int) -> Value: ...


def accept_greedy(argmax: ByNode[int], drafted: Sequence[int], tree: Tree) -> tuple[list[int], int]:
    """Accept while the draft names the target's argmax: the exact rule at T=0, where p and q are one-hot.

    `argmax` has the target's K + 1 argmax tokens, read only at the root and at accepted nodes. Returns the accepted
    nodes, from the root's child down, and the token to emit after them.
    """
    path: list[int] = []
    node = ROOT
    while True:
        token = argmax[node + 1]
        node = next((child for child in tree.children[node + 1] if drafted[child] == token), ROOT)
        if node == ROOT:
            return path, token
        path.append(node)


def accept_exact(
    p: ByNode[Tensor], q: Tensor | None, drafted: Tensor, tree: Tree, generator: torch.Generator | None = None
) -> tuple[list[int], Tensor]:
    """Verify a tree by speculative sampling: recursive rejection, sibling by sibling, down from the root.

    At each node the first child's token x is accepted with probability min(1, p(x)/q(x)). If it is rejected, p becomes
    the residual norm(max(0, p − q)), and the next sibling is tried against it with its own q, which no longer holds the
    earlier siblings. When no sibling is left, the token to emit is drawn from the residual. After a leaf a bonus token
    is drawn from p. Each emitted token has distribution p, for any q. A chain is the case of one child (Leviathan et
    al. 2023, algorithm 1; Chen et al. 2023, algorithm 2; siblings: Miao et al. 2023, SpecInfer, algorithm 2; without
    replacement: Chen et al. 2024, Sequoia, algorithm 2).

    Where q is NaN nothing was drawn, as where it is zero: the token is rejected, p stays as it is, and a warning is
    given. p must be finite.

    Args:
        p: K + 1 distributions (V,); only those at the root and at accepted nodes are read.
        q: the distribution that each node's token was drawn from, (K, V): for a later sibling q without the earlier
            siblings' tokens, renormalised; all zero where no token was left. None where the draft is deterministic (q
            one-hot); then siblings must be distinct.
        drafted: the drafted tokens, (K,).

    Returns:
        The accepted nodes, from the root's child down, and the token to emit after them, (1,).
    """
    root = p[0]
    # Numbers for all nodes at once: one transfer to the host for q(x), and one for r.
    q_x = [1.0] * len(tree) if q is None else q.gather(1, drafted[:, None])[:, 0].tolist()
    if any(map(math.isnan, q_x)):
        warnings.warn("proposer: q is not a number at some drafted tokens, which are rejected", stacklevel=2)
    r = torch.rand(len(tree), generator=generator, device=root.device, dtype=root.dtype).tolist()
    path: list[int] = []
    node = ROOT
    while True:
        rest, accepted = root if node == ROOT else p[node + 1], ROOT
        for child in tree.children[node + 1]:
            token = drafted[child]
            # Strict: r can be 0, and even then a token with p = 0 must not pass. Where q had no token left for this
            # sibling (q = 0), nothing was drawn.
            if q_x[child] > 0 and r[child] * q_x[child] < float(rest[token]):
                accepted = child
                break
            # Where q is NaN nothing was drawn, and p stays as it is.
            if not math.isnan(q_x[child]):
                rest = residual(rest, None if q is None else q[child], token)
                rest = rest / rest.sum()
        if accepted == ROOT:
            return path, draw(rest, generator)
        path.append(accepted)
        node = accepted


def accept_exact_chains(
    p_BKV: Tensor, q_BKV: Tensor | None, drafted_BK: Tensor, r_BK: Tensor, u_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `accept_exact` of a whole batch's chains, computed without reading any value on the host.

    Shape suffixes: B rows, K drafted tokens, V vocabulary.

    Args:
        p_BKV: the target's distributions, (B, K + 1, V).
        q_BKV: the drafter's distributions, (B, K, V); None where every draft is deterministic.
        drafted_BK: the drafted tokens; a shorter chain is filled up with any token.
        r_BK: uniform on [0, 1); 1 after the end of a shorter chain.
        u_B: uniform on [0, 1), float64, for the last token.

    Returns:
        The number of accepted tokens, (B,), and the token after them, (B,).
    """
    rows = torch.arange(p_BKV.shape[0], device=p_BKV.device)  # a trace would take `len` for a constant
    drafted_BK1 = drafted_BK[..., None]
    p_x = p_BKV[:, :-1].gather(-1, drafted_BK1)[..., 0]
    if q_BKV is None:
        accepted = r_BK < p_x
    else:
        q_x = q_BKV.gather(-1, drafted_BK1)[..., 0]
        # As in `accept_exact`: strict, and where q is zero or NaN nothing was drawn.
        accepted = (q_x > 0) & (r_BK * q_x < p_x) & (r_BK < 1)
    count_B = accepted.cumprod(1).sum(1)
    rest_BV = p_BKV[rows, count_B]
    if drafted_BK.shape[1]:
        # The last token is a correction where a drafted token was rejected, and a bonus after a whole chain.
        end_B = count_B.clamp(max=drafted_BK.shape[1] - 1)
        rejected_B = (count_B < drafted_BK.shape[1]) & (r_BK[rows, end_B] < 1)
        if q_BKV is None:
            q_BV = torch.zeros_like(rest_BV).scatter_(1, drafted_BK[rows, end_B, None], 1.0)
        else:
            q_BV = q_BKV[rows, end_B].nan_to_num(nan=0.0)
        rest_BV = torch.where(rejected_B[:, None], residual_rows(rest_BV, q_BV), rest_BV)
    return count_B, draw_rows(rest_BV, u_B)


def accept_siblings(
    p_M: Floats, q_M: Floats | None, indices: Sequence[int], r: Sequence[float]
) -> tuple[int | None, Floats]:
    """Return `accept_exact` among the siblings of one node, on M tokens: the support of q, or the drafted tokens.

    Args:
        p_M: the target's probabilities of these tokens; all other tokens keep theirs, 1 − Σ p_M together.
        q_M: the distribution that the first sibling was drawn from; None where the draft is deterministic.
        indices: each sibling's index among the M tokens.
        r: uniform on [0, 1), for each sibling.

    Returns:
        The accepted sibling, or None, and the residual of these tokens on the scale of `p_M`, (M,).
    """
    p_M = p_M.astype(np.float64)
    # p and q are not renormalised after a rejection. `mass` is the sum of p over all tokens, and `q_mass` that of q
    # without the earlier siblings.
    outside = max(0.0, 1.0 - float(p_M.sum()))
    mass, q_mass = 1.0, 1.0
    for i, index in enumerate(indices):
        q_x = 1.0 if q_M is None else (float(q_M[index]) / q_mass if q_mass > 0 else 0.0)
        if not q_x > 0:  # zero or NaN: nothing was drawn
            continue
        if r[i] * q_x < float(p_M[index]) / mass:
            return i, p_M
        if q_M is None:
            rest_M = p_M.copy()
            rest_M[index] = 0.0
        else:
            rest_M = np.maximum(p_M - q_M * (mass / q_mass), 0.0)
            q_M = q_M.copy()
            q_M[index] = 0.0
            q_mass = float(q_M.sum())
        if outside + float(rest_M.sum()) > 0:  # else rounding leaves no mass, as in `residual`
            p_M, mass = rest_M, outside + float(rest_M.sum())
    return None, p_M


def residual_rows(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """Return `residual` of each row, (B, V), with q_BV one-hot for a deterministic draft."""
    rest_BV = (p_BV - q_BV).clamp_(min=0.0)
    return torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BV)


def residual(p: Tensor, q: Tensor | None, x: Tensor) -> Tensor:
    """Return max(0, p − q), (V,), the unnormalised distribution of the token that replaces the rejected x.

    A q of None is one-hot on x. Where rounding leaves no mass (p = q), it is p itself, which is never written to.
    """
    rest = p.scatter(0, x.view(1), 0.0) if q is None else (p - q).clamp(min=0.0)
    return rest if bool(rest.any()) else p
