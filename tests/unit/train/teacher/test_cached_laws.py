"""Cached laws: what a bucket knows of a law."""

import pytest
import torch

from draftsmith.decode.sampling import Sampler
from draftsmith.train.losses.chunked import ChunkSizes, chunked_features, chunked_sum
from draftsmith.train.losses.distributions import CachedDistributions
from draftsmith.train.losses.divergences import DIVERGENCES
from draftsmith.train.losses.objective import NAMES, Objective
from draftsmith.train.losses.output_head import OutputHead
from draftsmith.train.replay_metrics import replay_features

N, V = 40, 23
LAWS = {"full": {}, "warm": {"temperature": 0.7}, "cut": {"temperature": 0.8, "top_k": 9, "top_p": 0.9}}
# The reverse KL is infinite where p is cut, and refused.
PAIRS = [(name, sampler) for name in NAMES for sampler in LAWS if (name, sampler) != ("reverse_kl", "cut")]


def drawn(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(N, V, generator=generator) * 2 for _ in range(2))
    return p, q, torch.randint(V, (N,), generator=generator)


def warped(temperature: float = 1.0, **sampler: float) -> Sampler:
    return Sampler.of(temperature, **sampler)


def cached(p: torch.Tensor, labels: torch.Tensor, k: int, **sampler: float) -> CachedDistributions:
    return CachedDistributions.of(p, labels, warped(**sampler), k)


def objectives(name: str, **sampler: float) -> Objective:
    return Objective({name: 1.0}, **sampler)


@pytest.mark.parametrize(("name", "sampler"), PAIRS)
def test_with_all_tokens_everything_is_that_of_the_full_law(name, sampler):
    p, q, labels = drawn()
    objective = objectives(name, **LAWS[sampler])
    values, gradients = [], []
    for source in (p, cached(p, labels, V, **LAWS[sampler])):
        own = q.clone().requires_grad_(True)
        value = objective.features(source, own, labels).sum()
        values.append(value.item())
        gradients.append(torch.autograd.grad(value, own)[0])
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    assert torch.allclose(*gradients, atol=1e-5)
    assert gradients[0].abs().sum() > 0
    warping = warped(**LAWS[sampler])
    full = replay_features(p, q, labels, warping)
    assert torch.allclose(full, replay_features(cached(p, labels, V, **LAWS[sampler]), q, labels, warping), atol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 5, 22])
@pytest.mark.parametrize(("name", "sampler"), [pair for pair in PAIRS if pair[0] in DIVERGENCES])
def test_a_bucket_bounds_every_divergence_from_below(name, sampler, k):
    """Data processing: merging outcomes makes no f-divergence larger; and k + 1 outcomes are a merging of k + 2."""
    p, q, labels = drawn(k)
    objective = objectives(name, **LAWS[sampler])
    full, bucket, finer = (
        objective.features(source, q, labels)[:, 0]
        for source in (p, cached(p, labels, k, **LAWS[sampler]), cached(p, labels, k + 1, **LAWS[sampler]))
    )
    rounding = 1e-5 * full.max()
    assert (bucket <= finer + rounding).all() and (finer <= full + rounding).all()
    assert (bucket >= -rounding).all() and bucket.sum() > 0
    if k == 1 and sampler != "cut":
        assert (bucket < full - 1e-4).any()


@pytest.mark.parametrize("k", [1, 2, 5, 22])
@pytest.mark.parametrize("sampler", LAWS)
def test_replay_bounds_acceptance_and_knows_the_rest(sampler, k):
    """0 ≤ α_bucket − α ≤ min(p_tail, q_tail); a and agreement are exact."""
    p, q, labels = drawn(k)
    warping = warped(**LAWS[sampler])
    bucket = cached(p, labels, k, **LAWS[sampler])
    full, found = replay_features(p, q, labels, warping), replay_features(bucket, q, labels, warping)
    assert torch.allclose(full[:, 0], found[:, 0], atol=1e-6)
    assert torch.equal(full[:, 3], found[:, 3])
    q_law = warping.probabilities(q, [])
    tails = torch.minimum(bucket.log_tail.exp(), 1 - q_law.gather(1, bucket.ids).sum(-1))
    gap = found[:, 1] - full[:, 1]
    assert (gap >= -1e-6).all() and (gap <= tails + 1e-6).all()
    known = (bucket.ids == q.argmax(-1, keepdim=True)).any(-1)
    assert torch.allclose(full[known, 2], found[known, 2], atol=1e-6)
    assert (found[~known, 2] == 0).all()
    assert (full[~known, 2] <= bucket.log_p.exp()[~known, -1] + 1e-6).all()  # less probable than the k-th


def test_a_tail_is_summed_over_its_own_tokens():
    """In float32, 1 − Σ q of the others would be 0 here, and so would its gradient."""
    scores = torch.tensor([[30.0, 29.0, 1.0, -2.0, 0.5]], requires_grad=True)
    sampler = CachedDistributions(
        torch.tensor([[0, 1]], dtype=torch.int32), *(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1))
    )
    found = sampler.bucket(scores.log_softmax(-1))
    exact = scores.detach().double().log_softmax(-1)
    assert found[0, 2].item() == pytest.approx(exact[0, 2:].logsumexp(-1).item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(found[0, 2], scores)
    assert gradient[0, 2:].sum().item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("k", [1, 3, V])
@pytest.mark.parametrize(("name", "sampler"), PAIRS)
def test_extreme_laws_give_finite_gradients(name, sampler, k):
    p, q = torch.full((4, V), -1e4), torch.full((4, V), -1e4)
    p[0, 3], q[0, 7], p[1, 3], q[1, 3], p[2, 3], q[3, 3] = (1e4,) * 6
    labels = torch.tensor([3, 3, 7, 7])
    bucket = cached(p, labels, k, **LAWS[sampler])
    own = q.requires_grad_(True)
    objective = objectives(name, **LAWS[sampler])
    loss = objective.features(bucket, own, labels).sum()
    (gradient,) = torch.autograd.grad(loss, own)
    assert loss.isfinite() and gradient.isfinite().all()
    assert replay_features(bucket, own.detach(), labels, Sampler.of(0.8)).isfinite().all()


def test_among_equals_the_argmax_comes_first():
    p = torch.zeros(3, V)
    p[1, 5:9] = 2.0
    p[2, 11] = 1.0
    for k in (1, 4, V):
        sampler = cached(p, torch.zeros(3, dtype=torch.long), k)
        assert torch.equal(sampler.ids[:, 0], p.argmax(-1))
        assert all(len(set(row)) == k for row in sampler.ids.tolist())


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_the_lean_loss_slices_a_cached_law(chunk_size):
    """Value, features and gradients are those of all positions at once, in half precision, too."""
    generator = torch.Generator().manual_seed(0)
    p, _, labels = drawn()
    hidden, weight = torch.randn(N, 8, generator=generator), torch.randn(V, 8, generator=generator)
    sampler = cached(p, labels, 4)
    sampler = CachedDistributions(sampler.ids.int(), sampler.log_p.half(), sampler.log_tail, sampler.log_p_of_text)
    objective = Objective({"forward_kl": 0.5, "tvd": 1.0})
    weights, sizes = torch.rand(N, 1, generator=generator), ChunkSizes(chunk_size * V, 3 * V)
    leaves = [hidden.requires_grad_(True), weight.requires_grad_(True)]
    values = objective.features(sampler, hidden @ weight.T, labels)
    found, features = chunked_sum(objective.features, weights, labels, hidden, OutputHead(weight), sampler, sizes)
    assert torch.allclose(features, values, atol=1e-5)
    assert torch.allclose(
        chunked_features(objective.features, labels, hidden, OutputHead(weight), sampler, sizes), features
    )
    eager = torch.autograd.grad((values * weights).sum(), leaves)
    for a, b in zip(eager, torch.autograd.grad(found, leaves), strict=True):
        assert torch.allclose(a, b, atol=1e-4)
