"""The loss in bounded memory equals the eager one: value, gradients, and what it holds."""

import pytest
import torch
from families import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig, LlamaConfig

from draftsmith.decode.errors import InputError
from draftsmith.distill import divergence, lean_divergence
from draftsmith.train.losses import chunked
from draftsmith.train.losses.chunked import ChunkSizes, chunked_objectives, chunked_sum
from draftsmith.train.losses.distributions import LiveDistributions
from draftsmith.train.losses.divergences import NAMES
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead, head_of, last_hidden, require_split

N, V, H = 40, 53, 12


def tensors(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "q_hidden": normal(N, H),
        "q_weight": normal(V, H) * 0.5,
        "q_bias": normal(V),
        "p_hidden": normal(N, 2 * H),
        "p_weight": normal(V, 2 * H) * 0.5,
        "labels": torch.randint(V, (N,), generator=generator),
        "mask": torch.rand(N, generator=generator) < 0.7,
    }


HEADS = {"plain": {}, "bias": {"bias": True}, "soft-capped and scaled": {"bias": True, "scale": 0.7, "softcap": 4.0}}


def q_head(t: dict[str, Tensor], bias: bool = False, **options: float) -> OutputHead:
    return OutputHead(t["q_weight"], t["q_bias"] if bias else None, **options)


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradients_are_the_eager_ones(name, head, chunk_size, monkeypatch):
    monkeypatch.setattr(chunked, "ON_CPU", ChunkSizes(2**24, 3 * V))  # parts of three positions
    t = tensors()
    leaves = [t[key].requires_grad_(True) for key in ("q_hidden", "q_weight", "q_bias")]
    leaves = leaves if "bias" in HEADS[head] else leaves[:2]
    own, options = q_head(t, **HEADS[head]), {"temperature": 0.8, "mask": t["mask"], "labels": t["labels"]}
    eager = divergence(t["p_hidden"] @ t["p_weight"].T, own(t["q_hidden"]), name, **options)
    found = lean_divergence(t["q_hidden"], own, t["p_hidden"], t["p_weight"], name, chunk_size=chunk_size, **options)
    # Laws are taken in float32 on both sides.
    assert found.item() == pytest.approx(eager.item(), rel=1e-5)
    for a, b in zip(torch.autograd.grad(eager, leaves), torch.autograd.grad(2 * found, leaves), strict=True):
        assert torch.allclose(2 * a, b, atol=1e-6 * float(a.abs().max()) * 20)
        assert b.abs().sum() > 0


def test_a_head_that_is_cut_gets_its_gradient_in_place():
    t = tensors()
    weight = t["q_weight"].requires_grad_(True)
    args = (t["p_hidden"], t["p_weight"][:50])
    found = lean_divergence(t["q_hidden"], OutputHead(weight).cut(50), *args)
    eager = divergence(args[0] @ args[1].T, t["q_hidden"] @ weight[:50].T)
    (a,), (b,) = torch.autograd.grad(eager, weight), torch.autograd.grad(found, weight)
    assert a.shape == b.shape == (V, H) and torch.allclose(a, b, atol=1e-6)


def test_only_what_needs_a_gradient_gets_one():
    t = tensors()
    hidden = t["q_hidden"].requires_grad_(True)
    loss = lean_divergence(hidden, t["q_weight"], t["p_hidden"], t["p_weight"])
    loss.backward()
    assert hidden.grad is not None and t["q_weight"].grad is None
    assert not lean_divergence(hidden.detach(), t["q_weight"], t["p_hidden"], t["p_weight"]).requires_grad


def test_a_loss_is_differentiated_once():
    t = tensors()
    loss = lean_divergence(t["q_hidden"].requires_grad_(True), t["q_weight"], t["p_hidden"], t["p_weight"])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated already"):
        loss.backward()


def test_autocast_multiplies_in_bfloat16_and_sums_in_float32():
    t = tensors(torch.float32)
    leaves = [t["q_hidden"].requires_grad_(True), t["q_weight"].requires_grad_(True)]
    with torch.autocast("cpu", torch.bfloat16):
        eager = divergence(torch.nn.functional.linear(t["p_hidden"], t["p_weight"]),
                           torch.nn.functional.linear(*leaves))  # fmt: skip
        found = lean_divergence(*leaves, t["p_hidden"], t["p_weight"], chunk_size=8)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(eager.item(), rel=1e-3)
    for a, b in zip(torch.autograd.grad(eager, leaves), torch.autograd.grad(found, leaves), strict=True):
        assert b.dtype == torch.float32
        assert (a - b).abs().max() < 0.02 * a.abs().max()  # bfloat16 has 8 bits


def test_the_heads_gradient_adds_up_in_float32():
    """In bfloat16 a sum over forty chunks loses what each adds: here a hundredth, there a two-hundredth."""
    t = tensors(torch.float32)
    half = {name: t[name].bfloat16() for name in ("q_hidden", "q_weight", "p_hidden", "p_weight")}
    weight = half["q_weight"].requires_grad_(True)
    lean_divergence(half["q_hidden"], weight, half["p_hidden"], half["p_weight"], chunk_size=1).backward()
    exact = half["q_weight"].detach().double().requires_grad_(True)
    p, q = half["p_hidden"].double() @ half["p_weight"].double().T, half["q_hidden"].double() @ exact.T
    divergence(p, q).backward()
    error = (weight.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert weight.grad.dtype == torch.bfloat16 and error < 0.006


def test_no_tensor_holds_all_logits(monkeypatch):
    """Every tensor that torch makes on the way is smaller than (N, V), and those of the loss than a part."""
    largest = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.shape[-1:] == (V,) and out.shape[0] not in (H, 2 * H):  # heads, turned
                largest.append(out.numel())
            return out

    monkeypatch.setattr(chunked, "ON_CPU", ChunkSizes(2**24, 2 * V))
    t = tensors()
    weight = t["q_weight"].requires_grad_(True)
    with Sizes():
        lean_divergence(t["q_hidden"], weight, t["p_hidden"], t["p_weight"], chunk_size=5).backward()
    assert max(largest) == 5 * V
    assert sum(size == 5 * V for size in largest) <= 2 * 3 * (N // 5)  # logits of both models, a few views
    assert sum(size <= 2 * V for size in largest) > len(largest) // 2


LLAMA = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0}
LLAMA |= {"intermediate_size": 32, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
SCALED = {
    "llama, tied": LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "cohere": CohereConfig(**LLAMA, logit_scale=0.3),
    "granite": GraniteConfig(**LLAMA, logits_scaling=4.0),
}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "gpt-neox", "opt", "phi", *SCALED])
def test_hidden_states_and_head_are_the_logits(family):
    model = AutoModelForCausalLM.from_config(SCALED[family]) if family in SCALED else tiny_model(family)
    require_split(model.train(), "draft")
    assert model.training
    ids = torch.randint(1, 61, (2, 7))
    model.eval()
    with torch.no_grad():
        assert torch.allclose(head_of(model)(last_hidden(model, input_ids=ids)), model(input_ids=ids).logits, atol=1e-5)


def test_a_model_that_does_more_to_its_logits_is_refused(target, monkeypatch):
    real = type(target).forward

    def doubled(self, *args, **kwargs):
        out = real(self, *args, **kwargs)
        out.logits = out.logits * 2
        return out

    require_split(target, "draft")
    monkeypatch.setattr(type(target), "forward", doubled)
    with pytest.raises(InputError, match=r"^draft: expected a model whose logits are its head's, found Llama"):
        require_split(target, "draft")


@pytest.mark.parametrize("autocast", [False, True])
def test_heads_that_share_p_sum_up_to_what_each_has_alone(autocast):
    """Two heads of their own, and one that is the first's; where a position does not count nothing is learned."""
    t = tensors(torch.float32)
    objective, sizes = Objective({"forward_kl": 0.7, "cross_entropy": 0.3}), ChunkSizes(9 * V, 4 * V)
    teacher = LiveDistributions(t["p_hidden"], OutputHead(t["p_weight"]))
    states = [(t["q_hidden"] * scale).requires_grad_(True) for scale in (1.0, -0.5, 0.3)]
    other = (t["q_weight"].flip(0)).requires_grad_(True)
    own, bias = t["q_weight"].requires_grad_(True), t["q_bias"].requires_grad_(True)
    heads = [OutputHead(own, bias), OutputHead(other), OutputHead(own, bias)]
    counts, weights = [torch.ones(N), t["mask"].float(), (~t["mask"]).float()], (1.0, 0.5, 0.25)
    learners = list(zip(states, heads, counts, weights, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = chunked_objectives(objective, t["labels"], learners, teacher, sizes)
        expected = sum(
            chunked_sum(objective.features, weight * count[:, None], t["labels"], state, head, teacher, sizes)[0]
            for state, head, count, weight in learners
        )
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    parameters = [*states, own, other, bias]
    gradients = [torch.autograd.grad(3 * loss, parameters) for loss in (found, expected)]
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    assert not gradients[0][1][~t["mask"]].any()


@pytest.mark.parametrize("frozen", [False, True])
def test_two_maps_side_by_side_are_one_whose_halves_learn_apart(frozen):
    """A frozen one gets no gradient, and none is computed for it."""
    t = tensors()
    features, sizes = Objective({"forward_kl": 1.0}).features, ChunkSizes(9 * V, 4 * V)
    teacher = LiveDistributions(t["p_hidden"], OutputHead(t["p_weight"]))
    seen = torch.cat([t["q_hidden"], t["p_hidden"][:, :5]], 1).requires_grad_(True)
    first, second = t["q_weight"].requires_grad_(not frozen), t["p_weight"][:, :5].clone().requires_grad_(True)
    whole = torch.cat([first, second], 1)
    weights, apart = torch.ones(N, 1), OutputHead(first, t["q_bias"], softcap=4.0, side_weight=second)
    torch.testing.assert_close(apart(seen), OutputHead(whole, t["q_bias"], softcap=4.0)(seen))
    torch.testing.assert_close(apart.cut(50)(seen), apart(seen)[:, :50])
    leaves = [seen, second] if frozen else [seen, first, second]
    losses = [
        chunked_sum(features, weights, t["labels"], seen, head, teacher, sizes)[0]
        for head in (apart, OutputHead(whole, t["q_bias"], softcap=4.0))
    ]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
    for one, two in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
        torch.testing.assert_close(one, two)
