"""Divergences between the target's p and the draft's q: eager references over the full vocabulary.

Names follow the papers: the *forward* KL is KL(p ‖ q), which covers p's modes; the *reverse* KL(q ‖ p) seeks them.
Shape suffixes: N positions, E outcomes (the V tokens of a vocabulary, or some of them and the rest as one).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.decode.errors import InputError, at_least, between, more_than, one_of

PerToken = Callable[[Tensor, Tensor, float], Tensor]
"""(log p, log q, parameter) → (N,). The parameter is a mixture's weight, or η of `lk_hybrid`; the others ignore it."""


def forward_kl(log_p_NE: Tensor, log_q_NE: Tensor, mix: float = 0.5) -> Tensor:
    """Return KL(p ‖ q) = Σ p (log p − log q), (N,) (Hinton et al. 2015; DistillSpec, Zhou et al. 2023, section 4.1)."""
    return _kl(log_p_NE, log_q_NE)


def reverse_kl(log_p_NE: Tensor, log_q_NE: Tensor, mix: float = 0.5) -> Tensor:
    """Return KL(q ‖ p), (N,) (MiniLLM, Gu et al. 2023, section 2.1)."""
    return _kl(log_q_NE, log_p_NE)


def jsd(log_p_NE: Tensor, log_q_NE: Tensor, mix: float = 0.5) -> Tensor:
    """Return β KL(p ‖ m) + (1 − β) KL(q ‖ m), m = β p + (1 − β) q, (N,) (GKD, Agarwal et al. 2023, equation 1).

    It tends to β KL(p ‖ q) as β → 0 and to (1 − β) KL(q ‖ p) as β → 1.
    """
    log_m_NE = _mixture(log_p_NE, log_q_NE, mix)
    return mix * _kl(log_p_NE, log_m_NE) + (1.0 - mix) * _kl(log_q_NE, log_m_NE)


def skew_kl(log_p_NE: Tensor, log_q_NE: Tensor, mix: float = 0.1) -> Tensor:
    """Return KL(p ‖ α p + (1 − α) q), (N,), finite even where q is 0 (DistiLLM, Ko et al. 2024, section 3.1)."""
    return _kl(log_p_NE, _mixture(log_p_NE, log_q_NE, mix))


def skew_reverse_kl(log_p_NE: Tensor, log_q_NE: Tensor, mix: float = 0.1) -> Tensor:
    """Return KL(q ‖ α q + (1 − α) p), (N,) (DistiLLM, section 3.1)."""
    return _kl(log_q_NE, _mixture(log_q_NE, log_p_NE, mix))


def tvd(log_p_NE: Tensor, log_q_NE: Tensor, mix: float = 0.5) -> Tensor:
    """Return ½ Σ_v |p − q| = 1 − α, (N,) (DistillSpec, section 4.1; Leviathan et al. 2023, lemma 3.3)."""
    return 0.5 * (log_p_NE.exp() - log_q_NE.exp()).abs().sum(-1)


def lk_hybrid(log_p_NE: Tensor, log_q_NE: Tensor, eta: float = 3.0) -> Tensor:
    """Return λ KL(p ‖ q) + (1 − λ) TV, λ = e^(−η α) per position, (N,) (LK losses, Samarin et al. 2026, 2602.23881).

    λ is a constant in the gradient. Far from the target, where TV has almost no gradient, this is the forward KL; near
    it, this is TV, on which decoding speed depends. η = 0 gives the forward KL, η → ∞ gives TV.
    """
    return lk_blend(forward_kl(log_p_NE, log_q_NE), tvd(log_p_NE, log_q_NE), eta)


def lk_blend(kl_N: Tensor, tv_N: Tensor, eta: float) -> Tensor:
    """Return λ KL + (1 − λ) TV, (N,), with λ = e^(−η α) for each position's own α = 1 − TV."""
    lam_N = (-eta * (1.0 - tv_N.detach())).exp()  # λ carries no gradient
    return lam_N * kl_N + (1.0 - lam_N) * tv_N


def nla(log_p_NE: Tensor, log_q_NE: Tensor, mix: float = 0.5) -> Tensor:
    """Return −log Σ_v min(p, q), (N,) (LK losses, 2602.23881): TV's gradient ÷ α, so that a poor start learns."""
    return -torch.minimum(log_p_NE, log_q_NE).logsumexp(-1)


DIVERGENCES: dict[str, PerToken] = {
    f.__name__: f for f in (forward_kl, reverse_kl, jsd, skew_kl, skew_reverse_kl, tvd, lk_hybrid, nla)
}
NAMES = (*DIVERGENCES, "cross_entropy")


def divergence(
    p_logits: Tensor,
    q_logits: Tensor,
    name: str = "forward_kl",
    temperature: float = 1.0,
    mask: Tensor | None = None,
    beta: float = 0.5,
    alpha: float = 0.1,
    labels: Tensor | None = None,
    eta: float = 3.0,
) -> Tensor:
    """Return the mean divergence over positions, in nats; gradients flow to `q_logits`.

    Args:
        p_logits: the target's logits, (N, V), and those of the draft, `q_logits`, likewise.
        name: a key of `DIVERGENCES`, or `cross_entropy`.
        temperature: divides both logits; no factor T² is applied, since the value is that of the deployment at T.
        mask: (N,) bool, the positions that count; all if None.
        beta: the weight of p in `jsd`, in (0, 1).
        alpha: how far the skewed divergences mix their first distribution into the second, in (0, 1).
        labels: (N,) int64, the text's tokens; `cross_entropy` needs them and ignores `p_logits` and `temperature`.
        eta: η of `lk_hybrid`, at least 0.

    Raises:
        InputError: an unknown name, an argument out of range, or cross entropy without labels.
    """
    check_divergence(name, temperature, beta, alpha, eta)
    values = per_token(p_logits, q_logits, name, temperature, beta, alpha, labels, eta)
    return values.mean() if mask is None else values[mask].mean()


def per_token(
    p_logits: Tensor,
    q_logits: Tensor,
    name: str,
    temperature: float = 1.0,
    beta: float = 0.5,
    alpha: float = 0.1,
    labels: Tensor | None = None,
    eta: float = 3.0,
) -> Tensor:
    """Return the divergence of each position, (N,), for arguments that passed `check_divergence`."""
    if name == "cross_entropy":
        if labels is None:
            raise InputError("labels: expected the text's tokens for cross_entropy, found none")
        return torch.nn.functional.cross_entropy(q_logits.float(), labels, reduction="none")
    # float32 first: in half precision the logarithms of small probabilities lose most of their digits.
    log_p_NE, log_q_NE = (logits.float().div(temperature).log_softmax(-1) for logits in (p_logits, q_logits))
    return DIVERGENCES[name](log_p_NE, log_q_NE, parameter_of(name, beta, alpha, eta))


def parameter_of(name: str, beta: float, alpha: float, eta: float) -> float:
    """Return the parameter that a divergence takes."""
    if name == "lk_hybrid":
        return eta
    return alpha if name.startswith("skew") else beta


def check_divergence(name: str, temperature: float, beta: float, alpha: float, eta: float = 3.0) -> None:
    """Raise an InputError that names the argument out of range."""
    one_of(NAMES).check("divergence", name)
    more_than(0).check("temperature", temperature)
    between(0, 1).check("beta", beta)
    between(0, 1).check("alpha", alpha)
    at_least(0).check("eta", eta)


def _mixture(log_a_NE: Tensor, log_b_NE: Tensor, weight: float) -> Tensor:
    """Return log(w a + (1 − w) b), without leaving the log domain: a probability may underflow."""
    return torch.logaddexp(log_a_NE + math.log(weight), log_b_NE + math.log1p(-weight))


def _kl(log_a_NE: Tensor, log_b_NE: Tensor) -> Tensor:
    return (log_a_NE.exp() * (log_a_NE - log_b_NE)).sum(-1)
