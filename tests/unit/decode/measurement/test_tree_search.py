"""Trees: the reference, the exact search against enumeration, and the choice by rounds of its own."""

from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.tree_search import (
    acceptance_estimate,
    heaviest_tree,
    independence_tree,
    mean_acceptance_length,
    path_masses,
    rank_accuracies,
    search_budgets,
    search_tree,
    tree_choices,
)
from draftsmith.decode.planning.costs import RoundCosts
from draftsmith.decode.replay.ranks import NONE, TextRanks
from draftsmith.decode.tree import Tree


def text(ranks, most: int = 10, limit: int | None = None) -> TextRanks:
    """A text of these ranks, where the geometry lets something be drafted."""
    ranks = np.array(ranks, dtype=np.int16)
    found = TextRanks(ranks, (most,) * ranks.shape[1], limit or len(ranks))
    ranks[~found.drafted | (ranks >= most)] = NONE
    return found


def random_text(seed: int, tokens: int = 40, heads: int = 3, most: int = 4) -> TextRanks:
    return text(np.random.default_rng(seed).geometric(0.5, (tokens, heads)) - 1, most)


def closed(paths) -> bool:
    chosen = set(paths)
    return all((len(p) == 1 or p[:-1] in chosen) and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in chosen) for p in chosen)


def enumerated(masses, paths, nodes: int) -> float:
    """The greatest mass of any tree of so many of the paths."""
    return max(sum(masses.get(p, 0.0) for p in own) for own in combinations(paths, nodes) if closed(own))


def test_a_rarer_earlier_sibling_is_paid_for():
    masses = {(0,): 1.0, (1,): 5.0, (0, 0): 3.0, (0, 0, 1): 9.0}
    chosen = {n: set(tree_choices(heaviest_tree(masses, n))) for n in (1, 2, 3, 4, 9)}
    assert chosen[1] == {(0,)}
    assert chosen[2] == {(0,), (1,)}
    assert chosen[3] == {(0,), (1,), (0, 0)}
    # (0, 0, 0) is worth nothing, but without it there is no (0, 0, 1).
    assert chosen[4] == {(0,), (0, 0), (0, 0, 0), (0, 0, 1)}
    assert chosen[9] == {(0,), (1,), (0, 0), (0, 0, 0), (0, 0, 1)}


@pytest.mark.parametrize("seed", range(4))
def test_the_heaviest_tree_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    paths = [p for depth in (1, 2) for p in product(range(3), repeat=depth)] + [(0, 0, 0), (0, 0, 1), (2, 2, 0)]
    masses = {p: float(rng.exponential()) for p in paths if rng.random() < 0.7}
    for nodes in range(1, 8):
        tree = heaviest_tree(masses, nodes)
        assert len(tree) <= nodes
        found = sum(masses.get(p, 0.0) for p in tree_choices(tree))
        assert found == pytest.approx(enumerated(masses, paths, nodes), abs=1e-12)


def test_masses_are_those_of_a_count_by_hand():
    texts, weights = [random_text(0), random_text(1, tokens=7), random_text(2, tokens=1)], []
    for own in texts:
        weights.append(np.random.default_rng(5).random(len(own)))
    for given in (None, weights):
        expected: Counter = Counter()
        for i, own in enumerate(texts):
            for start in range(1, len(own)):
                for depth in range(3):
                    # The last token is emitted whether it was drafted or not.
                    if start + depth >= len(own) - 1 or own.ranks[start, depth] == NONE:
                        break
                    path = tuple(int(r) for r in own.ranks[start, : depth + 1])
                    expected[path] += 1.0 if given is None else given[i][start]
        found = path_masses(texts, given)
        assert found.keys() == expected.keys()
        for path, mass in expected.items():
            assert found[path] == pytest.approx(mass)


def test_accuracies_are_shares_of_the_drafted_tokens():
    # Rounds from 1, 2 and 3 draft; the last token, of index 3, is not drafted where the length limit ends the text.
    found = rank_accuracies([text([[9, 9], [0, 1], [2, 9], [9, 9]], most=3, limit=9)])
    assert found.tolist() == pytest.approx(np.array([[1 / 3, 0, 1 / 3], [0, 1 / 2, 0]]))
    with pytest.raises(InputError, match=r"^completions: expected some of more than 3 tokens"):
        rank_accuracies([text([[0, 0], [0, 0]])])


def test_the_length_of_a_tree_is_that_of_the_decoders_rounds():
    own, tree = (
        text([[9, 9], [0, 0], [1, 9], [1, 0], [0, 9], [9, 9], [0, 0]], limit=9),
        Tree.from_choices([(0,), (1,), (0, 0), (0, 1)]),
    )
    # From 0 one token; from 1 (0), (0, 0); from 4 (0); from 6 (0), which ends the text.
    assert own.starts(tree) == [0, 1, 4, 6]
    assert mean_acceptance_length([own], tree) == 7 / 4
    assert acceptance_estimate([own, own], tree).value == 7 / 4


def correlated(seed: int, tokens: int = 200) -> TextRanks:
    """Heads that are right together or not at all: their accuracies say nothing of it."""
    rng = np.random.default_rng(seed)
    return text(np.array([[0, 1, 1], [1, 0, 0]])[rng.integers(0, 2, tokens)], most=4)


def test_joint_shares_see_what_accuracies_cannot():
    texts, others = [correlated(seed) for seed in range(4)], [correlated(seed) for seed in range(10, 14)]
    for nodes in (4, 6):
        searched, independent = search_tree(texts, nodes), independence_tree(texts, nodes)
        assert len(searched) <= nodes
        assert mean_acceptance_length(others, searched) > mean_acceptance_length(others, independent) + 0.1


def test_starts_that_the_tree_does_not_reach_do_not_count():
    """Behind each accepted token one that no tree accepts: what is likely from any start is not what rounds meet."""
    # After the first token, rounds start at odd positions; from even ones another path would be right, more often.
    rows = [[9, 9]] + [[0, 9], [1, 0]] * 30
    own = text(rows, limit=99)
    masses = path_masses([own])
    assert masses[(1,)] > 0 and masses[(1, 0)] > 0
    alike = heaviest_tree(masses, 3)
    assert set(tree_choices(alike)) == {(0,), (1,), (1, 0)}
    # The rounds of that tree start at odd positions alone, of which each accepts one token: (1) is never met.
    assert set(own.starts(alike)[1:]) == set(range(1, 61, 2))
    weights = np.zeros(len(own))
    weights[own.starts(alike)] = 1
    assert set(tree_choices(heaviest_tree(path_masses([own], [weights]), 3))) == {(0,)}


@pytest.mark.parametrize("seed", range(3))
def test_the_search_never_falls_behind_its_candidates_on_the_selection(seed):
    texts, selection = [random_text(seed + i) for i in range(3)], [random_text(20 + seed + i) for i in range(2)]
    for nodes in (1, 5, 12):
        tree = search_tree(texts, nodes, selection)
        assert 1 <= len(tree) <= nodes
        found = mean_acceptance_length(selection, tree)
        assert found >= mean_acceptance_length(selection, independence_tree(texts, nodes))
        assert found >= mean_acceptance_length(selection, heaviest_tree(path_masses(texts), nodes))


def test_where_no_tree_of_so_few_nodes_is_worth_anything_one_node_is_drafted():
    own = text(np.full((9, 2), 3), most=4)
    assert search_tree([own], 2) == independence_tree([own], 3) == Tree.chain(1)
    assert len(search_tree([own], 4)) == 4


def test_costs_choose_the_size():
    texts = [random_text(seed) for seed in range(3)]
    for slope in (0.0, 0.05, 5.0):
        seconds = {1: 1.0, 41: 1.0 + 40 * slope}
        budgets = search_budgets(
            texts, [8, 1, 2, 20, 40], lambda trees, t=seconds: [RoundCosts(t, 0.0, overhead=0.1)] * len(trees)
        )
        assert [len(b.tree) for b in budgets] == sorted(len(b.tree) for b in budgets)
        for b in budgets:
            assert b.acceptance_length == mean_acceptance_length(texts, b.tree)
            expected = b.acceptance_length / (1 + slope * len(b.tree) + 0.1)
            assert b.speedup == pytest.approx(expected) and b.verification == pytest.approx(1 + slope * len(b.tree))
        best = len(max(budgets, key=lambda b: b.speedup).tree)
        # Where verifying is free, the most that adds anything; where it is dear, the least.
        assert best == {0.0: len(budgets[-1].tree), 5.0: 1}.get(slope, best)
        assert 1 < best < len(budgets[-1].tree) or slope != 0.05
    # What adds nothing to a smaller tree is not measured again.
    same = search_budgets([text(np.full((9, 1), 0))], [1, 2, 3], lambda trees: [RoundCosts({1: 1.0}, 0.0)] * len(trees))
    assert [len(b.tree) for b in same] == [1]


def test_what_cannot_be_searched_is_refused():
    for own, nodes, field in ((random_text(0), 0, "nodes"), (text(np.full((9, 2), 9), most=4), 3, "completions")):
        with pytest.raises(InputError, match=f"^{field}: expected "):
            search_tree([own], nodes)
