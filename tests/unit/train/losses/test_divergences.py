"""Divergences by their identities; no figure here was copied from the code's own output."""

import math

import pytest
import torch
from torch.nn import functional

from draftsmith.decode.errors import InputError
from draftsmith.distill import divergence
from draftsmith.train.losses.divergences import (
    DIVERGENCES,
    NAMES,
    forward_kl,
    jsd,
    lk_hybrid,
    nla,
    per_token,
    skew_kl,
    skew_reverse_kl,
    tvd,
)

N, V = 16, 23


def logits(seed: int, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(N, V, generator=torch.Generator().manual_seed(seed)) * scale


LABELS = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(9))


def value(p: torch.Tensor, q: torch.Tensor, name: str, **options: object) -> float:
    return divergence(p, q, name, labels=LABELS, **options).item()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_zero_for_equal_laws_and_positive_otherwise(name):
    p, q = logits(0), logits(1)
    # float32: each of the V terms is off by about 6e-8 of a log-probability below 20.
    assert per_token(p, p.clone(), name, 1.0, 0.3, 0.1, None).abs().max() < 1e-6
    assert per_token(p, q, name, 1.0, 0.3, 0.1, None).min() > 0


def test_cross_entropy_is_not_zero_but_torchs():
    q = logits(1)
    # The mean is taken in another order: the last bit may differ.
    assert value(logits(0), q, "cross_entropy") == pytest.approx(functional.cross_entropy(q, LABELS).item(), rel=1e-6)
    # It is about the text, which the temperature of a law does not change.
    assert value(logits(0), q, "cross_entropy", temperature=3.0) == value(logits(5), q, "cross_entropy")


def test_reverse_kl_is_forward_kl_with_the_roles_exchanged():
    p, q = logits(0), logits(1)
    assert value(p, q, "reverse_kl") == value(q, p, "forward_kl")
    assert value(p, q, "reverse_kl") != pytest.approx(value(p, q, "forward_kl"), rel=1e-2)


def test_forward_kl_is_torchs_and_the_sum_over_the_vocabulary():
    p, q = logits(0).log_softmax(-1), logits(1).log_softmax(-1)
    expected = functional.kl_div(q, p, log_target=True, reduction="batchmean")
    assert value(logits(0), logits(1), "forward_kl") == pytest.approx(float(expected), rel=1e-6)
    by_hand = sum(float(p[0, v].exp()) * float(p[0, v] - q[0, v]) for v in range(V))
    assert float(forward_kl(p, q)[0]) == pytest.approx(by_hand, rel=1e-5)


def test_jsd_is_symmetric_under_exchange_and_bounded():
    p, q = logits(0, 8.0), logits(1, 8.0)
    for beta in (0.1, 0.5, 0.8):
        assert value(p, q, "jsd", beta=beta) == pytest.approx(value(q, p, "jsd", beta=1 - beta), rel=1e-5)
    assert value(p, q, "jsd", beta=0.5) == pytest.approx(value(q, p, "jsd", beta=0.5), rel=1e-6)
    assert per_token(p, q, "jsd", 1.0, 0.5, 0.1, None).max() <= math.log(2) + 1e-6
    apart = torch.tensor([[50.0, 0.0]]), torch.tensor([[0.0, 50.0]])
    assert float(divergence(*apart, "jsd")) == pytest.approx(math.log(2), rel=1e-6)


def test_jsd_tends_to_either_kl():
    log_p, log_q = (logits(seed).double().log_softmax(-1) for seed in (0, 1))
    beta = 1e-6
    # What is left is β/2 times a χ² of about 10² here; float64 rounding, divided by β, is 1e-10.
    assert torch.allclose(jsd(log_p, log_q, beta) / beta, forward_kl(log_p, log_q), rtol=1e-3)
    assert torch.allclose(jsd(log_p, log_q, 1 - beta) / beta, forward_kl(log_q, log_p), rtol=1e-3)


def test_skewed_kls_mix_their_first_law_into_the_second():
    log_p, log_q = (logits(seed).double().log_softmax(-1) for seed in (0, 1))
    mixed = (0.2 * log_p.exp() + 0.8 * log_q.exp()).log()
    assert torch.allclose(skew_kl(log_p, log_q, 0.2), forward_kl(log_p, mixed))
    assert torch.allclose(skew_reverse_kl(log_p, log_q, 0.2), skew_kl(log_q, log_p, 0.2))
    assert torch.allclose(skew_kl(log_p, log_q, 1e-9), forward_kl(log_p, log_q), atol=1e-6)
    # Bounded by −log of the weight, whatever q leaves out.
    apart = torch.tensor([[50.0, 0.0]]), torch.tensor([[0.0, 50.0]])
    assert float(divergence(*apart, "skew_kl", alpha=0.2)) == pytest.approx(-math.log(0.2), rel=1e-6)


def test_tvd_is_one_minus_the_overlap_and_pinsker_holds():
    p, q = logits(0).softmax(-1), logits(1).softmax(-1)
    tv = per_token(logits(0), logits(1), "tvd", 1.0, 0.5, 0.1, None)
    assert torch.allclose(tv, 1 - torch.minimum(p, q).sum(-1), atol=1e-6)
    for name in ("forward_kl", "reverse_kl"):
        for scale in (0.1, 1.0, 5.0):
            p, q = logits(2, scale), logits(3, scale)
            tv, kl = (per_token(p, q, n, 1.0, 0.5, 0.1, None) for n in ("tvd", name))
            assert (tv <= (kl / 2).sqrt() + 1e-6).all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_temperature_divides_both_logits_and_nothing_else(name):
    p, q = logits(0), logits(1)
    assert value(p, q, name, temperature=2.0) == value(p / 2, q / 2, name)
    assert value(p, q, name, temperature=2.0) < value(p, q, name)


# lk_hybrid's λ is a constant in its gradient, which has a test of its own.
@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name != "lk_hybrid"])
def test_gradients_agree_with_finite_differences_and_descend(name):
    p = logits(0)[:2, :5]
    q = logits(1)[:2, :5].double().requires_grad_(True)
    log_p = p.double().log_softmax(-1)
    assert torch.autograd.gradcheck(lambda x: DIVERGENCES[name](log_p, x.log_softmax(-1), 0.3), q)


def gradient(function, log_p, q, *args):
    x = q.clone().requires_grad_(True)
    return torch.autograd.grad(function(log_p, x.log_softmax(-1), *args).sum(), x)[0]


def test_lk_hybrid_blends_both_gradients_by_a_constant():
    log_p, q = logits(0).double().log_softmax(-1), logits(1).double()
    alpha = torch.minimum(log_p.exp(), q.softmax(-1)).sum(-1)
    lam = (-2.0 * alpha).exp()
    values = lam * forward_kl(log_p, q.log_softmax(-1)) + (1 - lam) * (1 - alpha)
    assert torch.allclose(lk_hybrid(log_p, q.log_softmax(-1), 2.0), values, rtol=1e-12)
    expected = lam[:, None] * gradient(forward_kl, log_p, q) + (1 - lam[:, None]) * gradient(tvd, log_p, q)
    assert torch.allclose(gradient(lk_hybrid, log_p, q, 2.0), expected, rtol=1e-10, atol=1e-14)


def test_nla_is_minus_log_alpha_with_its_gradient_over_alpha():
    log_p, q = logits(0).double().log_softmax(-1), logits(1).double()
    alpha = torch.minimum(log_p.exp(), q.softmax(-1)).sum(-1)
    assert torch.allclose(nla(log_p, q.log_softmax(-1)), -alpha.log(), rtol=1e-12)
    # ∇(−log α) = −∇α ÷ α, and −∇α = ∇TV.
    assert torch.allclose(gradient(nla, log_p, q), gradient(tvd, log_p, q) / alpha[:, None], rtol=1e-10, atol=1e-14)
    # Where p is one token it is the cross entropy.
    point = torch.full((N, V), -torch.inf, dtype=torch.float64).scatter(1, LABELS[:, None], 0.0)
    assert torch.allclose(nla(point, q.log_softmax(-1)), functional.cross_entropy(q, LABELS, reduction="none"))


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_is_a_selection_of_rows(name):
    p, q = logits(0), logits(1).requires_grad_(True)
    mask = torch.arange(N) % 3 == 0
    masked = divergence(p, q, name, mask=mask, labels=LABELS)
    assert masked.item() == divergence(p[mask], q[mask], name, labels=LABELS[mask]).item()
    (gradient,) = torch.autograd.grad(masked, q)
    assert not gradient[~mask].any()
    assert gradient[mask].any(-1).all()


REFUSED = [
    ("divergence", {"name": "kl"}),
    *(("temperature", {"temperature": wrong}) for wrong in (0.0, -1.0, math.nan)),
    *(("beta", {"beta": wrong}) for wrong in (0.0, 1.0)),
    ("alpha", {"alpha": 0.0}),
    ("eta", {"name": "lk_hybrid", "eta": -1.0}),
    ("labels", {"name": "cross_entropy"}),
]


@pytest.mark.parametrize(("field", "options"), REFUSED)
def test_bad_arguments_are_refused_by_name(field, options):
    with pytest.raises(InputError, match=f"^{field}: expected"):
        divergence(logits(0), logits(1), **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_logits_give_finite_values_and_gradients(name, dtype):
    p = torch.full((4, V), -1e4)
    q = torch.full((4, V), -1e4)
    p[0, 3], q[0, 7] = 1e4, 1e4  # certain, and of different minds
    p[1, 3], q[1, 3] = 1e4, 1e4  # certain, and of one mind
    p[2, 3] = 1e4  # certain against uniform
    q[3, 3] = 1e4
    p, q = p.to(dtype), q.to(dtype).requires_grad_(True)
    values = per_token(p, q, name, 0.5, 0.5, 0.1, LABELS[:4])
    assert values.isfinite().all()
    (gradient,) = torch.autograd.grad(values.sum(), q)
    assert gradient.isfinite().all()
    if name in DIVERGENCES:
        # The logarithms of a mixture's two weights round.
        assert abs(values[1].item()) < (1e-7 if name.startswith("skew") else 1e-30)
