"""Acceptance rules, as pure functions of tensors.

p: the target's distributions, q: the drafter's, both after the same warping. Row 0 of p belongs to the root, the last
token of the text, and row i + 1 to node i of the draft's tree: the distribution of the token after it. Shape suffixes:
K drafted tokens, V vocabulary.
"""

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.decode.sampling import draw
from draftsmith.decode.tree import ROOT, Tree


def accept_greedy(chosen: Sequence[int], drafted: Sequence[int], tree: Tree) -> tuple[list[int], int]:
    """The exact rule at T=0, where p and q are one-hot: accept while the draft names the target's argmax.

    Args:
        chosen: the target's argmax tokens, K + 1 of them.
        drafted: the drafted tokens, K.
        tree: the draft's shape.

    Returns:
        The accepted nodes, from the root's child down, and the token to emit after them.
    """
    path: list[int] = []
    node = ROOT
    while True:
        wanted = chosen[node + 1]
        node = next((child for child in tree.children[node + 1] if drafted[child] == wanted), ROOT)
        if node == ROOT:
            return path, wanted
        path.append(node)


def accept_exact(
    p: Tensor, q: Tensor | None, drafted: Tensor, tree: Tree, generator: torch.Generator | None = None
) -> tuple[list[int], Tensor]:
    """Speculative sampling on a tree: recursive rejection, sibling by sibling, down from the root.

    At each node the first child's token x is accepted with probability min(1, p(x)/q(x)). If it is rejected, p becomes
    the residual norm(max(0, p − q)), and the next sibling is tried against it with the q that it was drawn from, which
    no longer holds the earlier siblings; when none is left, the token to emit is drawn from the residual. After a leaf
    a bonus token is drawn from p. Each emitted token has distribution p, whatever q is. A chain is the case of one
    child (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2; siblings: Miao et al. 2023, SpecInfer,
    algorithm 2; without replacement: Chen et al. 2024, Sequoia, algorithm 2).

    Where q is not a number nothing was drawn, as where it is zero: the token is rejected, p stays as it is, and a
    warning says so. p must be finite.

    Args:
        p: (K + 1, V).
        q: the distribution that each node's token was drawn from, (K, V): for a later sibling q without the earlier
            siblings' tokens, renormalised; all zero where no token was left. None where the draft is deterministic
            (q one-hot); then siblings must be distinct.
        drafted: the drafted tokens, (K,).
        tree: the draft's shape.
        generator: the source of randomness; the global one if None.

    Returns:
        The accepted nodes, from the root's child down, and the token to emit after them, (1,).
    """
    parents = torch.tensor(tree.parents, dtype=torch.long, device=p.device) + 1
    # In one transfer: what the first child of every node is tested with.
    p_x = p[parents, drafted].tolist()
    q_x = [1.0] * len(tree) if q is None else q.gather(1, drafted[:, None])[:, 0].tolist()
    if any(map(math.isnan, q_x)):
        warnings.warn("proposer: q is not a number at some drafted tokens, which are rejected", stacklevel=2)
    r = torch.rand(len(tree), generator=generator, device=p.device, dtype=p.dtype).tolist()
    path: list[int] = []
    node = ROOT
    while True:
        rest, accepted = p[node + 1], ROOT
        for i, child in enumerate(tree.children[node + 1]):
            token = drafted[child]
            weight = p_x[child] if i == 0 else float(rest[token])
            # Strict: r can be 0, and a token that the target rules out (p = 0) must not pass then. Where q
            # ran out of tokens before the siblings did (q = 0), nothing was drawn.
            if q_x[child] > 0 and r[child] * q_x[child] < weight:
                accepted = child
                break
            if not math.isnan(q_x[child]):
                rest = residual(rest, None if q is None else q[child], token)
                rest = rest / rest.sum()
        if accepted == ROOT:
            return path, draw(rest, generator)
        path.append(accepted)
        node = accepted


def residual(p: Tensor, q: Tensor | None, x: Tensor) -> Tensor:
    """Return max(0, p − q), the unnormalised distribution of the token that replaces a rejected draft.

    Args:
        p: the target's distribution, (V,); it is left as it is.
        q: the drafter's, (V,), or None for a one-hot one on x.
        x: the rejected token, a scalar.

    Returns:
        (V,); where rounding leaves no mass at all (p = q, whose rejection has probability zero), p itself.
    """
    rest = p.scatter(0, x.view(1), 0.0) if q is None else (p - q).clamp(min=0.0)
    return rest if bool(rest.any()) else p
