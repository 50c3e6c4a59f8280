"""The acceptance rules with hand-set distributions: never, always, sometimes accepted."""

import torch

from draftsmith.decode.acceptance import accept_exact, accept_greedy, residual
from draftsmith.decode.tree import Tree


def on_chain(p, q, drafted, generator=None) -> tuple[int, torch.Tensor]:
    """The exact rule on a chain: how many drafted tokens are accepted, and the token after them."""
    path, following = accept_exact(p, q, drafted, Tree.chain(len(drafted)), generator)
    assert path == list(range(len(path)))
    return len(path), following


def one_hot(*tokens: int, size: int = 4) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), size).float()


def test_equal_distributions_are_always_accepted():
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).repeat(4, 1)
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        drafted = torch.multinomial(p[0], 3, replacement=True, generator=generator)
        accepted, following = on_chain(p, p[:3], drafted, generator)
        assert accepted == 3
        assert following.shape == (1,)


def test_disjoint_distributions_are_never_accepted_and_the_residual_is_p():
    p, q = one_hot(2, 2), one_hot(1)
    for seed in range(50):
        accepted, following = on_chain(p, q, torch.tensor([1]), torch.Generator().manual_seed(seed))
        assert (accepted, int(following)) == (0, 2)


def test_acceptance_probability_is_p_over_q():
    p, q = torch.tensor([[0.25, 0.75], [0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
    generator = torch.Generator().manual_seed(0)
    n = 20_000
    accepted = sum(on_chain(p, q, torch.tensor([0]), generator)[0] for _ in range(n))
    # Binomial(20000, 1/4): sd 61; 5 sd leave a false alarm of 6e-7.
    assert abs(accepted - n / 4) < 5 * 61.3


def test_a_token_that_the_target_rules_out_is_rejected_even_when_r_is_zero(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *size, **kwargs: torch.zeros(*size, dtype=kwargs.get("dtype")))
    p, q = torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([[0.5, 0.5]])
    assert on_chain(p, q, torch.tensor([0]))[0] == 0


def test_nothing_after_a_rejection_is_accepted():
    p = one_hot(1, 2, 3, 0)
    assert on_chain(p, one_hot(0, 2, 3), torch.tensor([0, 2, 3]))[0] == 0
    assert on_chain(p, one_hot(1, 0, 3), torch.tensor([1, 0, 3]))[0] == 1


def test_bonus_comes_from_the_last_row_and_correction_from_the_residual():
    accepted, bonus = on_chain(one_hot(1, 3), one_hot(1), torch.tensor([1]))
    assert (accepted, int(bonus)) == (1, 3)
    p, q = torch.tensor([[0.0, 0.5, 0.5, 0.0]] * 2), torch.tensor([[0.9, 0.0, 0.1, 0.0]])
    seen = {int(on_chain(p, q, torch.tensor([0]), torch.Generator().manual_seed(s))[1]) for s in range(100)}
    assert seen == {1, 2}


def test_deterministic_proposal_is_a_one_hot_q():
    p = torch.tensor([[0.3, 0.7], [0.5, 0.5]])
    for seed in range(100):
        a = on_chain(p, None, torch.tensor([0]), torch.Generator().manual_seed(seed))
        b = on_chain(p, torch.tensor([[1.0, 0.0]]), torch.tensor([0]), torch.Generator().manual_seed(seed))
        assert a[0] == b[0] and int(a[1]) == int(b[1])


def test_no_draft_is_plain_decoding():
    assert on_chain(one_hot(2), None, torch.tensor([], dtype=torch.long))[0] == 0
    assert accept_greedy([5], [], Tree.chain(0)) == ([], 5)


def test_residual_is_clamped_not_softmaxed_and_leaves_its_arguments():
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.2, 0.7, 0.1])
    before = p.clone()
    assert torch.allclose(residual(p, q, torch.tensor(1)), torch.tensor([0.3, 0.0, 0.0]))
    assert torch.equal(residual(p, None, torch.tensor(0)), torch.tensor([0.0, 0.5, 0.0]))
    assert torch.equal(p, before)


def test_residual_without_mass_falls_back_to_p():
    p = torch.tensor([0.5, 0.5])
    assert torch.equal(residual(p, p.clone(), torch.tensor(0)), p)
    one = torch.tensor([1.0, 0.0])
    assert torch.equal(residual(one, None, torch.tensor(0)), one)


def test_greedy_equals_the_exact_rule_on_one_hot_distributions():
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        target, drafted = torch.randint(0, 3, (5,), generator=generator), torch.randint(0, 3, (4,), generator=generator)
        accepted, following = on_chain(one_hot(*target.tolist()), one_hot(*drafted.tolist()), drafted, generator)
        assert accepted == len(accept_greedy(target.tolist(), drafted.tolist(), Tree.chain(len(drafted)))[0])
        assert int(following) == int(target[accepted])
