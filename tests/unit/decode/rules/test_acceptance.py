"""The acceptance rules with hand-set distributions: never, always, sometimes accepted."""

import warnings

import pytest
import torch

from draftsmith.decode.rules.acceptance import accept_exact, accept_exact_chains, accept_greedy, residual
from draftsmith.decode.sampling import uniforms
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


def test_a_token_that_the_target_rules_out_is_rejected_even_when_r_is_zero(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *size, **kwargs: torch.zeros(*size, dtype=kwargs.get("dtype")))
    p, q = torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([[0.5, 0.5]])
    assert on_chain(p, q, torch.tensor([0]))[0] == 0


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


# Trees


SIBLINGS = Tree.from_choices([(0,), (1,)])
TWO_DEEP = Tree.from_choices([(0,), (1,), (0, 0), (1, 0), (1, 1)])


def with_random_numbers(monkeypatch, *r: float) -> None:
    """Plant the r of every node; what is drawn after them is the middle of its law."""

    def rand(size, dtype=None, **options):
        return torch.tensor(r if size == len(r) else [0.5], dtype=dtype)

    monkeypatch.setattr(torch, "rand", rand)


def test_a_tree_is_walked_down_the_nodes_that_the_target_wants():
    drafted = torch.tensor([0, 1, 2, 2, 3])  # 0 → 2, 1 → 2 or 3
    for rows, path, token in [
        ((0, 2, 0, 3, 0, 0), [0, 2], 3),
        ((1, 2, 2, 3, 1, 0), [1, 3], 1),
        ((1, 2, 3, 0, 0, 2), [1, 4], 2),
        ((1, 2, 0, 0, 0, 0), [1], 0),
        ((0, 3, 2, 0, 0, 0), [0], 3),
        ((2, 2, 2, 3, 1, 0), [], 2),  # 2 is drafted below, not here
    ]:
        p = one_hot(*rows)
        assert accept_greedy(rows, drafted.tolist(), TWO_DEEP) == (path, token)
        for q in (None, one_hot(*drafted.tolist())):
            accepted, following = accept_exact(p, q, drafted, TWO_DEEP, torch.Generator().manual_seed(0))
            assert (accepted, int(following)) == (path, token)


@pytest.mark.parametrize(
    ("r", "path", "token"),
    [
        ((0.19, 0.99), [0], 3),  # r < p = 0.2
        ((0.21, 0.0), [1], 0),
        ((0.21, 0.24), [1], 0),  # r < 0.2/0.8
        ((0.21, 0.26), [], 2),  # the middle of the residual (0, 0, 0.4, 0.2)/0.6
    ],
)
def test_deterministic_siblings_share_what_the_earlier_ones_left(monkeypatch, r, path, token):
    with_random_numbers(monkeypatch, *r)
    p = torch.tensor([[0.2, 0.2, 0.4, 0.2], [0, 0, 0, 1.0], [1.0, 0, 0, 0]])
    accepted, following = accept_exact(p, None, torch.tensor([0, 1]), SIBLINGS)
    assert (accepted, int(following)) == (path, token)


@pytest.mark.parametrize(
    ("r", "path", "token"),
    [
        ((0.49, 0.99), [0], 3),  # r < p/q = 0.25/0.5
        ((0.51, 0.49), [1], 0),  # the residual is (0, 1, 0.5, 0.5)/2, the second q (0, 1, 2, 1)/4
        ((0.51, 0.51), [], 1),  # and the residual of that (0, 1, 0, 0)
    ],
)
def test_drawn_siblings_are_tried_with_their_own_q_against_the_residual(monkeypatch, r, path, token):
    with_random_numbers(monkeypatch, *r)
    p = torch.tensor([[0.25, 0.25, 0.3125, 0.1875], [0, 0, 0, 1.0], [1.0, 0, 0, 0]])
    q = torch.tensor([[0.5, 0.125, 0.25, 0.125], [0, 0.25, 0.5, 0.25]])
    accepted, following = accept_exact(p, q, torch.tensor([0, 2]), SIBLINGS)
    assert (accepted, int(following)) == (path, token)


def test_a_sibling_that_the_residual_rules_out_is_rejected_even_when_r_is_zero(monkeypatch):
    """p(1) > 0, but of the residual of the first sibling's q nothing is left on it."""
    with_random_numbers(monkeypatch, 0.9, 0.0)
    p = torch.tensor([[0.1, 0.3, 0.6, 0.0]] * 3)
    q = torch.tensor([[0.6, 0.4, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    path, token = accept_exact(p, q, torch.tensor([0, 1]), SIBLINGS)
    assert (path, int(token)) == ([], 2)


def test_a_sibling_that_was_never_drawn_is_never_accepted():
    """q has one token for two siblings: its second row is zero, whatever token stands there."""
    p, q = one_hot(2, 3, 3), torch.tensor([[0, 1.0, 0, 0], [0, 0, 0, 0]])
    for seed in range(20):
        path, token = accept_exact(p, q, torch.tensor([1, 2]), SIBLINGS, torch.Generator().manual_seed(seed))
        assert (path, int(token)) == ([], 2)


def test_a_tree_leaves_its_arguments_as_they_are():
    generator = torch.Generator().manual_seed(0)
    p = torch.full((6, 4), 0.25)
    q = torch.randn(5, 4, generator=generator).softmax(-1)
    drafted = q.argmax(-1)  # more likely than p has them, so that some are rejected
    before = p.clone(), q.clone(), drafted.clone()
    lengths = {len(accept_exact(p, q, drafted, TWO_DEEP, generator)[0]) for _ in range(50)}
    assert lengths == {0, 1, 2}
    assert all(map(torch.equal, before, (p, q, drafted)))


@pytest.mark.parametrize("lengths", [[4, 4, 4, 4], [4, 2, 0, 3]])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_chains_of_a_batch_are_verified_as_each_alone(lengths, deterministic):
    """Token for token, with the same random numbers: q that is p, that is not a number, that is anything."""
    rows, size, vocab = len(lengths), 4, 11
    for trial in range(60):
        torch.manual_seed(trial)
        p = (2 * torch.randn(rows, size + 1, vocab)).softmax(-1)
        q = (2 * torch.randn(rows, size, vocab)).softmax(-1)
        if trial % 3 == 0:
            q = p[:, :-1].clone()
        drafted = torch.multinomial(q.flatten(0, 1), 1).view(rows, size)
        if trial % 4 == 0:
            q[1, 1] = float("nan")
        generators = [torch.Generator().manual_seed(100 * trial + row) for row in range(rows)]
        r = uniforms(generators, lengths, p.dtype, p.device)
        u = uniforms(generators, [1] * rows, torch.float64, p.device)[:, 0]
        counts, tokens = accept_exact_chains(p, None if deterministic else q, drafted, r, u)
        for row, k in enumerate(lengths):
            generator = torch.Generator().manual_seed(100 * trial + row)
            one_q = None if deterministic else q[row, :k]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                accepted, token = on_chain(p[row, : k + 1], one_q, drafted[row, :k], generator)
            assert (accepted, int(token)) == (int(counts[row]), int(tokens[row]))
