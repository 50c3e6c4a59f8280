"""Divergences between the target's p and the draft's q: eager references in full vocabulary.

Shape suffixes: N positions, V vocabulary. Naming follows the papers: the *forward* KL is KL(p ‖ q), which covers p's
modes; the *reverse* KL(q ‖ p) seeks them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.decode.errors import InputError

PerToken = Callable[[Tensor, Tensor, float], Tensor]


def forward_kl(log_p: Tensor, log_q: Tensor, beta: float = 0.5) -> Tensor:
    """KL(p ‖ q) = Σ_v p (log p − log q), (N,) (Hinton et al. 2015; DistillSpec, Zhou et al. 2023, section 4.1)."""
    return _kl(log_p, log_q)


def reverse_kl(log_p: Tensor, log_q: Tensor, beta: float = 0.5) -> Tensor:
    """KL(q ‖ p), (N,) (MiniLLM, Gu et al. 2023, section 2.1)."""
    return _kl(log_q, log_p)


def jsd(log_p: Tensor, log_q: Tensor, beta: float = 0.5) -> Tensor:
    """β KL(p ‖ m) + (1 − β) KL(q ‖ m) with m = β p + (1 − β) q, (N,) (GKD, Agarwal et al. 2023, equation 1).

    It tends to β KL(p ‖ q) as β → 0 and to (1 − β) KL(q ‖ p) as β → 1.
    """
    log_weights = log_p.new_tensor([beta, 1.0 - beta]).log()
    log_m = torch.logaddexp(log_p + log_weights[0], log_q + log_weights[1])
    return beta * _kl(log_p, log_m) + (1.0 - beta) * _kl(log_q, log_m)


def tvd(log_p: Tensor, log_q: Tensor, beta: float = 0.5) -> Tensor:
    """Total variation ½ Σ_v |p − q| = 1 − α, (N,) (DistillSpec, section 4.1; Leviathan et al. 2023, lemma 3.3)."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


DIVERGENCES: dict[str, PerToken] = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd, "tvd": tvd}
NAMES = (*DIVERGENCES, "cross_entropy")


def divergence(
    p_logits: Tensor,
    q_logits: Tensor,
    name: str = "forward_kl",
    temperature: float = 1.0,
    mask: Tensor | None = None,
    beta: float = 0.5,
    labels: Tensor | None = None,
) -> Tensor:
    """Return the mean divergence over positions, in nats; gradients flow to `q_logits`.

    Args:
        p_logits: the target's logits, (N, V).
        q_logits: the draft's, (N, V).
        name: one of `forward_kl`, `reverse_kl`, `jsd`, `tvd`, `cross_entropy`.
        temperature: divides both logits; no factor T² is applied, for the value is that of the law deployed at T.
        mask: (N,) bool, the positions that count; all if None.
        beta: the mixture weight of p in `jsd`, in (0, 1).
        labels: (N,) int64, the text's tokens; `cross_entropy` needs them and ignores `p_logits` and `temperature`.

    Raises:
        InputError: an unknown name, a β outside (0, 1), a temperature ≤ 0, or cross entropy without labels.
    """
    check_divergence(name, temperature, beta)
    values = per_token(p_logits, q_logits, name, temperature, beta, labels)
    return values.mean() if mask is None else values[mask].mean()


def per_token(
    p_logits: Tensor, q_logits: Tensor, name: str, temperature: float, beta: float, labels: Tensor | None
) -> Tensor:
    """Return the divergence of each position, (N,), for arguments that `check_divergence` passed."""
    if name == "cross_entropy":
        if labels is None:
            raise InputError("labels: expected the text's tokens for cross_entropy, found none")
        return torch.nn.functional.cross_entropy(q_logits.float(), labels, reduction="none")
    log_p, log_q = (logits.float().div(temperature).log_softmax(-1) for logits in (p_logits, q_logits))
    return DIVERGENCES[name](log_p, log_q, beta)


def check_divergence(name: str, temperature: float, beta: float) -> None:
    """Raise an InputError that names the argument that is out of range."""
    if name not in NAMES:
        raise InputError(f"divergence: expected one of {', '.join(NAMES)}, found {name!r}")
    if not temperature > 0:
        raise InputError(f"temperature: expected more than 0, found {temperature}")
    if not 0 < beta < 1:
        raise InputError(f"beta: expected a value between 0 and 1, found {beta}")


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return (log_a.exp() * (log_a - log_b)).sum(-1)
