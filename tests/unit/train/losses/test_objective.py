"""The objective: sums of divergences under the deployment's law."""

import pytest
import torch

from draftsmith.decode.errors import InputError
from draftsmith.decode.replay.rounds import overlap
from draftsmith.decode.sampling import Sampler
from draftsmith.train.losses.divergences import divergence
from draftsmith.train.losses.objective import NAMES, Objective

N, V = 14, 17


def drawn(seed=0):
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(N, V, generator=generator) * 2 for _ in range(2))
    labels = p.softmax(-1).multinomial(1, generator=generator)[:, 0]
    return p, q, labels


def total(objective, p, q, labels):
    return objective.features(p, q, labels).sum()


@pytest.mark.parametrize("name", NAMES)
def test_one_term_is_its_divergence_summed(name):
    p, q, labels = drawn()
    objective = Objective({name: 1.0}, temperature=0.8, beta=0.3, alpha=0.2)
    expected = divergence(p, q, name, 0.8, beta=0.3, alpha=0.2, labels=labels) * N
    assert float(total(objective, p, q, labels)) == pytest.approx(float(expected), rel=1e-5)


def test_terms_add_by_their_weights():
    p, q, labels = drawn()
    weights = {"forward_kl": 0.7, "tvd": 2.0, "cross_entropy": 0.1}
    parts = sum(w * float(total(Objective({name: 1.0}), p, q, labels)) for name, w in weights.items())
    assert float(total(Objective(weights), p, q, labels)) == pytest.approx(parts, rel=1e-5)


@pytest.mark.parametrize("name", ["forward_kl", "tvd"])
def test_the_deployments_law_is_what_is_compared(name):
    p, q, labels = drawn()
    sampler = Sampler.of(0.7, top_k=6, top_p=0.9)
    warped_p, warped_q = sampler.probabilities(p, []), sampler.probabilities(q, [])
    found = total(Objective({name: 1.0}, 0.7, top_k=6, top_p=0.9), p, q, labels)
    expected = (1 - overlap(warped_p, warped_q)).sum()
    if name == "forward_kl":  # q is not cut: a divergence would be infinite
        log_p, log_q = warped_p.clamp(min=1e-45).log(), (q / 0.7).log_softmax(-1)
        expected = torch.where(warped_p > 0, warped_p * (log_p - log_q), 0.0).sum()
    assert found.item() == pytest.approx(float(expected), rel=1e-4)


def test_where_tokens_are_cut_the_kl_sees_all_of_q_and_alpha_what_is_deployed():
    p, q, labels = drawn()
    sampler = Sampler.of(0.7, top_k=6, top_p=0.9)
    warped_p, warped_q = sampler.probabilities(p, []), sampler.probabilities(q, [])
    kl = torch.where(warped_p > 0, warped_p * (warped_p.clamp(min=1e-45).log() - (q / 0.7).log_softmax(-1)), 0).sum(-1)
    alpha = overlap(warped_p, warped_q)
    lam = torch.exp(-2 * alpha)
    found = total(Objective({"lk_hybrid": 1.0}, 0.7, 6, 0.9, eta=2.0), p, q, labels)
    assert float(found) == pytest.approx(float((lam * kl + (1 - lam) * (1 - alpha)).sum()), rel=1e-4)
    # nla compares p with all of q: where they keep different tokens it still has a gradient.
    expected = -torch.minimum(warped_p, (q / 0.7).softmax(-1)).sum(-1).log().sum()
    assert float(total(Objective({"nla": 1.0}, 0.7, 6, 0.9), p, q, labels)) == pytest.approx(float(expected), rel=1e-4)
    apart = torch.full((1, V), -30.0).index_fill(1, torch.tensor([3]), 30.0)
    other = apart.roll(1, 1).requires_grad_(True)
    (gradient,) = torch.autograd.grad(Objective({"nla": 1.0}, top_k=1).features(apart, other, labels[:1]).sum(), other)
    assert gradient[0, 3] < -0.9 and gradient[0, 4] > 0.9


REFUSED = [
    *(("divergence", {"terms": terms}) for terms in ({}, {"kl": 1.0}, {"tvd": 0.0})),
    ("temperature", {"temperature": 0.0}),
    ("top_k", {"top_k": -1}),
    ("top_p", {"top_p": 0.0}),
    ("eta", {"eta": -0.5}),
    ("divergence", {"terms": {"reverse_kl": 1.0}, "top_k": 5}),
]


@pytest.mark.parametrize(("field", "options"), REFUSED)
def test_bad_arguments_are_refused_by_name(field, options):
    with pytest.raises(InputError, match=f"^{field}: expected"):
        Objective(**options)
