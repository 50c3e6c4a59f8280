"""What the exact rule does at the edges of its numbers, and for a batch; `test_rules.py` has its law."""

import warnings

import numpy as np
import pytest
import torch

from draftsmith.decode.rules.acceptance import (
    accept_exact,
    accept_exact_chains,
    accept_siblings,
    residual,
    residual_rows,
)
from draftsmith.decode.sampling import uniforms
from draftsmith.decode.tree import Tree


def on_chain(p, q, drafted, generator=None) -> tuple[int, torch.Tensor]:
    """The exact rule on a chain: how many drafted tokens are accepted, and the token after them."""
    path, following = accept_exact(p, q, drafted, Tree.chain(len(drafted)), generator)
    assert path == list(range(len(path)))
    return len(path), following


def test_residual_without_mass_falls_back_to_p():
    p = torch.tensor([0.5, 0.5])
    assert torch.equal(residual(p, p.clone(), torch.tensor(0)), p)
    assert torch.equal(residual_rows(p[None], p[None].clone()), p[None])
    assert accept_siblings(p.numpy(), np.array([0.6, 0.5]), [0], [0.9])[1].tolist() == [0.5, 0.5]
    one = torch.tensor([1.0, 0.0])
    assert torch.equal(residual(one, None, torch.tensor(0)), one)


# Trees


TWO_DEEP = Tree.from_choices([(0,), (1,), (0, 0), (1, 0), (1, 1)])


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
