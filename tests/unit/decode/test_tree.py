"""Token trees against naive computations, and the grown tree against every other one of its size."""

import itertools
import math
import random

import pytest
import torch
from conftest import tiny_llama

from draftsmith.decode import DraftModelProposer, InputError, Tree
from draftsmith.decode.proposers.base import DraftTask
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import ROOT

Path = tuple[int, ...]


def random_tree(rng: random.Random, size: int) -> Tree:
    return Tree(tuple(rng.randrange(ROOT, node) for node in range(size)))


def random_trees(seed: int = 0, count: int = 100) -> list[Tree]:
    rng = random.Random(seed)
    return [random_tree(rng, rng.randrange(13)) for _ in range(count)]


def ranks(tree: Tree, node: int) -> Path:
    """Medusa's name of a node: the rank among its siblings of each node on the way to it."""
    return tuple(tree.children[tree.parents[n] + 1].index(n) for n in tree.path(node))


def grown_subtrees(accuracies: list[list[float]], nodes: int, earlier_siblings: bool) -> set[frozenset[Path]]:
    """Every set of at most `nodes` paths that holds their parents, and where asked for their earlier siblings."""
    shapes = [range(len(ranks)) for ranks in accuracies]
    paths = [path for d in range(len(shapes)) for path in itertools.product(*shapes[: d + 1])]
    found = layer = {frozenset[Path]()}
    for _ in range(nodes):
        layer = {
            tree | {path}
            for tree in layer
            for path in paths
            if path not in tree
            and (len(path) == 1 or path[:-1] in tree)
            and (not earlier_siblings or path[-1] == 0 or (*path[:-1], path[-1] - 1) in tree)
        }
        found = found | layer
    return found


def expected_length(accuracies: list[list[float]], tree: frozenset[Path]) -> float:
    """E[accepted tokens] from the definition: at each depth one rank is right, or none, whatever was right before."""
    total = 0.0
    for right in itertools.product(*(range(len(ranks) + 1) for ranks in accuracies)):  # the last: none of them
        mass = math.prod([*r, 1 - sum(r)][i] for r, i in zip(accuracies, right, strict=True))
        accepted = 0
        while accepted < len(right) and right[: accepted + 1] in tree:
            accepted += 1
        total += mass * accepted
    return total


def best_length(accuracies: list[list[float]], nodes: int, earlier_siblings: bool = True) -> float:
    return max(expected_length(accuracies, tree) for tree in grown_subtrees(accuracies, nodes, earlier_siblings))


def grown_length(accuracies: list[list[float]], nodes: int) -> float:
    tree = Tree.from_accuracies(accuracies, nodes)
    assert len(tree) <= nodes
    return expected_length(accuracies, frozenset(ranks(tree, node) for node in range(len(tree))))


def test_a_chain_has_width_one():
    for length in range(6):
        tree = Tree.chain(length)
        assert tree.is_chain and len(tree) == tree.depth == length
        assert tree.parents == tuple(range(-1, length - 1)) and tree.depths == tuple(range(1, length + 1))
        assert tree.children == (*((node,) for node in range(length)), ())
        assert tree.path(length - 1) == list(range(length))
        assert torch.equal(tree.visible, torch.ones(length + 1, length + 1).tril().bool())
        assert length == 0 or tree == Tree.from_choices([(0,) * depth for depth in range(1, length + 1)])


def test_choices_in_medusas_notation():
    tree = Tree.from_choices([[1], [0, 0, 0], [0], (0, 1), [0, 0], [1, 0]])
    assert tree.parents == (-1, -1, 0, 0, 1, 2)  # (0) (1) (0 0) (0 1) (1 0) (0 0 0)
    assert tree.depths == (1, 1, 2, 2, 2, 3) and tree.depth == 3 and not tree.is_chain
    assert tree.children == ((0, 1), (2, 3), (4,), (5,), (), (), ())
    assert tree.path(5) == [0, 2, 5] and tree.path(4) == [1, 4] and tree.path(ROOT) == []
    assert tree.visible.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 0, 1],
    ]
    assert len(Tree.from_choices([])) == 0


def test_choices_name_the_nodes_that_they_became():
    rng = random.Random(1)
    for tree in random_trees(seed=1):
        choices = [ranks(tree, node) for node in range(len(tree))]
        rng.shuffle(choices)
        built = Tree.from_choices(choices)
        assert [ranks(built, node) for node in range(len(built))] == sorted(choices, key=lambda c: (len(c), c))


def test_trees_are_what_their_parents_say():
    for tree in random_trees():
        ancestors: list[set[int]] = []
        for node, parent in enumerate(tree.parents):
            ancestors.append({node} | (ancestors[parent] if parent != ROOT else set()))
            assert tree.path(node) == sorted(ancestors[node])  # parents come first
            assert tree.depths[node] == len(ancestors[node])
        assert tree.depth == max(map(len, ancestors), default=0)
        assert len(tree.children) == len(tree) + 1
        for parent in range(ROOT, len(tree)):
            assert list(tree.children[parent + 1]) == [n for n in range(len(tree)) if tree.parents[n] == parent]
        assert tree.is_chain == all(len(own) <= 1 for own in tree.children)
        assert tree.visible.dtype == torch.bool and tree.visible.shape == (len(tree) + 1, len(tree) + 1)
        for i, j in itertools.product(range(ROOT, len(tree)), repeat=2):
            assert bool(tree.visible[i + 1, j + 1]) == (j == ROOT or (i != ROOT and j in ancestors[i]))


def test_pruning_keeps_the_tree_above():
    for tree in random_trees():
        for depth in range(tree.depth + 2):
            pruned, kept = tree.pruned(depth)
            assert kept == [node for node in range(len(tree)) if tree.depths[node] <= depth]
            assert len(pruned) == len(kept) and pruned.depth == min(depth, tree.depth)
            for i, node in enumerate(kept):
                assert [kept[n] for n in pruned.path(i)] == tree.path(node)
                assert ranks(pruned, i) == ranks(tree, node)
            block = [0, *(node + 1 for node in kept)]
            assert torch.equal(pruned.visible, tree.visible[block][:, block])
        assert tree.pruned(tree.depth) == (tree, list(range(len(tree))))
        assert tree.pruned(0) == (Tree.chain(0), [])


def falling_accuracies(rng: random.Random) -> list[list[float]]:
    """Ragged: other ranks at each depth. No more than one candidate is right, and an earlier one is the likelier."""
    table = []
    for _ in range(rng.randrange(1, 4)):
        cuts = sorted(rng.random() for _ in range(rng.randrange(1, 4)))
        shares = [b - a for a, b in itertools.pairwise([0.0, *cuts])]
        table.append(sorted(shares, reverse=True))
    return table


def test_the_grown_tree_has_the_greatest_expected_length():
    rng = random.Random(0)
    for _ in range(25):
        accuracies, nodes = falling_accuracies(rng), rng.randrange(1, 6)
        own = grown_length(accuracies, nodes)
        assert own == pytest.approx(best_length(accuracies, nodes))
        # Verifying siblings in the order of their ranks costs nothing.
        assert own == pytest.approx(best_length(accuracies, nodes, earlier_siblings=False))


def test_no_node_of_zero_probability_is_grown():
    assert Tree.from_accuracies([[0.5, 0.0], [0.5, 0.0]], 9) == Tree.chain(2)
    assert Tree.from_accuracies([[0.5, 0.2], [0.0]], 9) == Tree.from_choices([(0,), (1,)])
    assert len(Tree.from_accuracies([[0.4, 0.3, 0.2], [0.5]], 100)) == 6


def test_the_grown_tree_is_best_where_a_later_rank_is_the_likelier():
    """Measured accuracies need not fall with the rank: those of rare ranks are noisy."""
    rng = random.Random(2)
    tables = [([[0.5, 0.0, 0.4], [0.1]], 3), ([[0.5, 0.1, 0.4], [0.3]], 3), ([[0.0, 0.9]], 2)]
    for _ in range(25):
        accuracies = falling_accuracies(rng)
        for own in accuracies:
            rng.shuffle(own)
        tables.append((accuracies, rng.randrange(1, 6)))
    for accuracies, nodes in tables:
        assert grown_length(accuracies, nodes) == pytest.approx(best_length(accuracies, nodes))


NO_PARENT, NO_SIBLING = "tree: expected the parent", "tree: expected the sibling"
REFUSED = [
    *(("tree: expected node", Tree, (parents,)) for parents in ((0,), (-1, 0, 2), (-1, 3, 0, 0), (-1, -2))),
    *((NO_PARENT, Tree.from_choices, (choices,)) for choices in ([(0,), (1, 0)], [(0,), (0, 0, 0)])),
    ("tree: expected every path once", Tree.from_choices, ([(0,), (1,), (0,), (1,)],)),
    *(("tree: expected paths", Tree.from_choices, ([(0,), path],)) for path in ((-1,), (0, -1), ())),
    *((NO_SIBLING, Tree.from_choices, (choices,)) for choices in ([(1,)], [(0,), (0, 0), (0, 2)])),
    *(
        ("accuracies", Tree.from_accuracies, (table, 3))
        for table in ([], [[]], [[], [0.5]], [[0.0]], [[0.0, 0.0], [0.9]])
    ),
    *(("accuracies", Tree.from_accuracies, ([[0.5], [0.2, wrong]], 3)) for wrong in (-0.1, 1.1, math.nan)),
    *(("nodes", Tree.from_accuracies, ([[0.5]], nodes)) for nodes in (0, -1)),
]


@pytest.mark.parametrize(("field", "make", "arguments"), REFUSED)
def test_what_is_no_tree_is_refused(field, make, arguments):
    with pytest.raises(InputError, match=f"^{field}"):
        make(*arguments)


@pytest.mark.parametrize("shape", [Tree.from_choices([(i,) for i in range(8)])])
def test_no_more_siblings_than_tokens(shape):
    proposer = DraftModelProposer(tiny_llama(0, vocab_size=7), tree=shape)
    with pytest.raises(InputError, match=r"^tree: expected at most V = 7 siblings, found 8$"):
        proposer.start(DraftTask(Sampler.of(0.0), 7, [None], 16, 3, True, False))
