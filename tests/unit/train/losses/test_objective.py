"""The objective: sums of divergences under the deployment's law, and the expected acceptance length."""

import math

import pytest
import torch

from draftsmith.decode.errors import InputError
from draftsmith.decode.replay.rounds import acceptance_probabilities, overlap
from draftsmith.decode.sampling import Sampler
from draftsmith.train.losses.chunk_sizes import ChunkSizes
from draftsmith.train.losses.chunked import chunked_objective
from draftsmith.train.losses.distributions import LiveDistributions
from draftsmith.train.losses.divergences import divergence, per_token
from draftsmith.train.losses.objective import NAMES, Objective, expected_accepted
from draftsmith.train.losses.output_head import OutputHead

N, V = 14, 17
FOLLOWS = torch.tensor([i not in (0, 5) for i in range(N)])  # two texts, of 5 and of 9 tokens


def drawn(seed=0):
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(N, V, generator=generator) * 2 for _ in range(2))
    labels = p.softmax(-1).multinomial(1, generator=generator)[:, 0]
    return p, q, labels


def total(objective, p, q, labels):
    return objective.shortfall(objective.features(p, q, labels), FOLLOWS)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("expected_length", "reached_tvd")])
def test_one_term_is_its_divergence_summed(name):
    p, q, labels = drawn()
    objective = Objective({name: 1.0}, temperature=0.8, beta=0.3, alpha=0.2)
    expected = divergence(p, q, name, 0.8, beta=0.3, alpha=0.2, labels=labels) * N
    assert float(total(objective, p, q, labels)) == pytest.approx(float(expected), rel=1e-5)


def test_terms_add_by_their_weights():
    p, q, labels = drawn()
    weights = {"forward_kl": 0.7, "tvd": 2.0, "cross_entropy": 0.1, "expected_length": 0.5}
    parts = sum(w * float(total(Objective({name: 1.0}), p, q, labels)) for name, w in weights.items())
    assert float(total(Objective(weights), p, q, labels)) == pytest.approx(parts, rel=1e-5)


@pytest.mark.parametrize("name", ["expected_length", "reached_tvd"])
def test_blocks_of_one_are_the_total_variation(name):
    p, q, labels = drawn()
    found = total(Objective({name: 1.0}, draft_length=1), p, q, labels)
    assert float(found) == pytest.approx(float(total(Objective({"tvd": 1.0}), p, q, labels)), rel=1e-5)


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 20])
def test_expected_accepted_is_the_sum_over_blocks(gamma):
    p, q, labels = drawn()
    sampler = Sampler.of(1.0)
    p, q = sampler.probabilities(p, []), sampler.probabilities(q, [])
    a, o = acceptance_probabilities(p, q, labels).double(), overlap(p, q).double()
    accepted, most = expected_accepted(a.log(), o, FOLLOWS, gamma)
    for t in range(N):
        end = 5 if t < 5 else N
        expected, reach = 0.0, 1.0
        for j in range(t, min(end, t + gamma)):
            expected += reach * float(o[j])
            reach *= float(a[j])
        assert float(accepted[t]) == pytest.approx(expected)
        assert int(most[t]) == min(gamma, end - t)


def test_its_mean_over_texts_is_what_a_round_accepts():
    """Over texts that p wrote, the average is the accepted tokens of a first round: those of the rounds in replay."""
    generator = torch.Generator().manual_seed(1)
    found = 0.0
    p, q = (torch.randn(3, V, generator=generator).softmax(-1).double() for _ in range(2))
    # All texts of 3 tokens whose laws do not depend on what was written: enumerated through a, by weight.
    for x in range(V):
        for y in range(V):
            weight = float(p[0, x] * p[1, y])
            labels = torch.tensor([x, y, 0])
            a = acceptance_probabilities(p, q, labels)
            accepted, _ = expected_accepted(a.log(), overlap(p, q), torch.tensor([False, True, True]), 3)
            found += weight * float(accepted[0])
    alpha = overlap(p, q)
    expected = float(alpha[0] + alpha[0] * alpha[1] + alpha[0] * alpha[1] * alpha[2])
    assert found == pytest.approx(expected)


def test_a_perfect_draft_falls_short_of_nothing():
    p, _, labels = drawn()
    for name in ("expected_length", "reached_tvd", "forward_kl", "tvd"):
        assert float(total(Objective({name: 1.0}), p, p.clone(), labels)) == pytest.approx(0, abs=1e-5)


def test_reached_tvd_has_the_same_value_and_the_gradient_of_a_weighted_tvd():
    p, q, labels = drawn()
    q.requires_grad_(True)
    whole, reached = (Objective({name: 1.0}, draft_length=3) for name in ("expected_length", "reached_tvd"))
    a, b = total(whole, p, q, labels), total(reached, p, q, labels)
    assert a.item() == pytest.approx(b.item(), rel=1e-6)
    (of_whole,), (of_reached,) = torch.autograd.grad(a, q), torch.autograd.grad(b, q)
    assert not torch.allclose(of_whole, of_reached, rtol=1e-2)
    # Each position weighs by how often a round that starts within γ before it gets there.
    ratio = acceptance_probabilities(p.softmax(-1), q.softmax(-1), labels).detach()
    weight = torch.zeros(N)
    for t in range(N):
        reach = 1.0
        for j in range(t, min(5 if t < 5 else N, t + 3)):
            weight[j] += reach
            reach *= float(ratio[j])
    (expected,) = torch.autograd.grad((weight * per_token(p, q, "tvd")).sum(), q)
    assert torch.allclose(of_reached, expected, atol=1e-6)


def test_gradients_agree_with_finite_differences():
    p, q, labels = (t[:6] for t in drawn())
    follows = torch.tensor([False, True, True, False, True, True])

    def length(x):
        log_p, log_q = p.double().log_softmax(-1), x.log_softmax(-1)
        log_a = (log_q - log_p).gather(1, labels[:, None])[:, 0].clamp(max=0)
        accepted, most = expected_accepted(log_a, torch.minimum(log_p, log_q).exp().sum(-1), follows, 3)
        return (most - accepted).sum()

    assert torch.autograd.gradcheck(length, q.double().requires_grad_(True))


@pytest.mark.parametrize("name", ["forward_kl", "jsd", "tvd", "expected_length", "skew_reverse_kl"])
def test_the_deployments_law_is_what_is_compared(name):
    p, q, _ = drawn()
    sampler = Sampler.of(0.7, top_k=6, top_p=0.9)
    warped_p, warped_q = sampler.probabilities(p, []), sampler.probabilities(q, [])
    labels = warped_p.argmax(-1)
    objective = Objective({name: 1.0}, 0.7, top_k=6, top_p=0.9, draft_length=1)
    found = total(objective, p, q.clone().requires_grad_(True), labels)
    if name in ("tvd", "expected_length"):
        expected = (1 - overlap(warped_p, warped_q)).sum()
    else:  # q is not cut: a divergence would be infinite
        log_p, log_q = warped_p.clamp(min=1e-45).log(), (q / 0.7).log_softmax(-1)
        kl = torch.where(warped_p > 0, warped_p * (log_p - log_q), 0.0).sum()
        expected = kl if name == "forward_kl" else None
    assert math.isfinite(found.item())
    if expected is not None:
        assert found.item() == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("lengths", [{}, {"expected_length": 0.3}, {"tvd": 2.0, "jsd": 0.1}])
def test_the_chunked_objective_is_the_eager_one(lengths):
    generator = torch.Generator().manual_seed(3)
    p_hidden, q_hidden = (torch.randn(N, 6, generator=generator) for _ in range(2))
    p_head, q_head = (torch.randn(V, 6, generator=generator) for _ in range(2))
    objective = Objective({"lk_hybrid": 1.0, "nla": 0.2, **lengths}, 0.9, draft_length=3)
    leaves = [q_hidden.requires_grad_(True), q_head.requires_grad_(True)]
    labels = drawn()[2]
    eager = 0.7 * objective.shortfall(objective.features(p_hidden @ p_head.T, q_hidden @ q_head.T, labels), FOLLOWS)
    teacher, sizes = LiveDistributions(p_hidden, OutputHead(p_head)), ChunkSizes(5 * V, 2 * V)
    found = chunked_objective(objective, q_hidden, OutputHead(q_head), teacher, labels, FOLLOWS, 0.7, sizes)
    assert found.item() == pytest.approx(eager.item(), rel=1e-5)
    for one, two in zip(*(torch.autograd.grad(loss, leaves) for loss in (eager, found)), strict=True):
        assert torch.allclose(one, two, atol=1e-5)


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


@pytest.mark.parametrize("name", ["expected_length", "reached_tvd"])
def test_extreme_logits_give_finite_gradients(name):
    p, q = torch.full((4, V), -1e4), torch.full((4, V), -1e4)
    p[0, 3], q[0, 7], p[1, 3], q[1, 3], p[2, 3], q[3, 3] = (1e4,) * 6
    q.requires_grad_(True)
    objective = Objective({name: 1.0}, draft_length=3)
    features = objective.features(p, q, torch.tensor([3, 3, 3, 3]))
    loss = objective.shortfall(features, torch.tensor([False, True, True, True]))
    (gradient,) = torch.autograd.grad(loss, q)
    assert loss.isfinite() and gradient.isfinite().all()


def test_a_curriculum_moves_from_the_forward_kl():
    objective = Objective({"tvd": 2.0})
    assert objective.after(0.0).terms == {"forward_kl": 1.0}
    assert objective.after(0.25).terms == {"tvd": 0.5, "forward_kl": 0.75}
    assert objective.after(1.0) is objective and objective.after(3.0) is objective
    assert Objective({"forward_kl": 1.0}).after(0.5).terms == {"forward_kl": 1.0}


REFUSED = [
    *(("divergence", {"terms": terms}) for terms in ({}, {"kl": 1.0}, {"tvd": 0.0})),
    ("temperature", {"temperature": 0.0}),
    ("top_k", {"top_k": -1}),
    ("top_p", {"top_p": 0.0}),
    ("draft_length", {"draft_length": 0}),
    ("eta", {"eta": -0.5}),
    ("divergence", {"terms": {"reverse_kl": 1.0}, "top_k": 5}),
]


@pytest.mark.parametrize(("field", "options"), REFUSED)
def test_bad_arguments_are_refused_by_name(field, options):
    with pytest.raises(InputError, match=f"^{field}: expected"):
        Objective(**options)
