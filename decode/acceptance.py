"""Acceptance rules, as pure functions of tensors.

p: the target's distributions, q: the drafter's, both after the same warping. Shape suffixes: K drafted tokens, V
vocabulary.
"""

import torch
from torch import Tensor

from draftsmith.decode.sampling import draw


def accept_exact(
    p: Tensor, q: Tensor | None, drafted: Tensor, generator: torch.Generator | None = None
) -> tuple[int, Tensor]:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2).

    A drafted token x is accepted with probability min(1, p(x)/q(x)); the first rejected one is replaced by a draw from
    the residual norm(max(0, p − q)); after full acceptance a bonus token is drawn from p. Each emitted token has law p,
    whatever q is.

    Args:
        p: the target's distributions at the drafted positions and the one after them, (K + 1, V).
        q: the distributions that the drafted tokens were drawn from, (K, V); None where the proposal is deterministic
            (a one-hot q).
        drafted: the drafted tokens, (K,).
        generator: the source of randomness; the global one if None.

    Returns:
        How many of the drafted tokens are accepted, 0…K, and the token to emit after them, (1,).
    """
    k = len(drafted)
    p_x = p[:k].gather(1, drafted[:, None])[:, 0]
    q_x = torch.ones_like(p_x) if q is None else q.gather(1, drafted[:, None])[:, 0]
    r = torch.rand(k, generator=generator, device=p.device, dtype=p.dtype)
    # Strict: r can be 0, and a token that the target rules out (p = 0) must not pass then.
    accepted = int((r * q_x < p_x).cumprod(0).sum()) if k else 0
    if accepted == k:
        return accepted, draw(p[k], generator)
    return accepted, draw(residual(p[accepted], None if q is None else q[accepted], drafted[accepted]), generator)


def residual(p: Tensor, q: Tensor | None, x: Tensor) -> Tensor:
    """Return max(0, p − q), the unnormalised law of the token that replaces a rejected draft.

    Args:
        p: the target's distribution, (V,); it is left as it is.
        q: the drafter's, (V,), or None for a one-hot one on x.
        x: the rejected token, a scalar.

    Returns:
        (V,); where rounding leaves no mass at all (p = q, whose rejection has probability zero), p itself.
    """
    rest = p.scatter(0, x.view(1), 0.0) if q is None else (p - q).clamp(min=0.0)
    return rest if bool(rest.any()) else p


def accept_greedy(target: Tensor, drafted: Tensor) -> int:
    """The exact rule at T=0, where p and q are one-hot: accept while the draft names the target's argmax.

    Args:
        target: the target's argmax tokens at the drafted positions and the one after them, (K + 1,).
        drafted: the drafted tokens, (K,).

    Returns:
        How many of the drafted tokens are accepted; `target[accepted]` is the token to emit after them.
    """
    return int((drafted == target[:-1]).cumprod(0).sum()) if len(drafted) else 0
