"""The search for the best tree to draft, on text that the target wrote.

The expected accepted length of a tree is the sum over its nodes of the share of rounds that pass through them. Cai
et al. (2024, arXiv 2401.10774, section 2.3.3) assume that heads are right independently, and multiply their accuracies.
Here joint shares are counted: how often the tokens after a start have the ranks (r_0, …, r_j) among the logits of heads
0 … j. For given weights of the starts the best tree is computed exactly. The starts of rounds depend on the tree, so
the search is repeated with each start weighted by the rounds of the trees so far.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import Estimate, ratio
from draftsmith.decode.planning.costs import RoundCosts
from draftsmith.decode.replay.ranks import TextRanks
from draftsmith.decode.tree import ROOT, Tree

Path = tuple[int, ...]
MOST_CANDIDATES = 6  # the most trees that the joint search tries


def tree_choices(tree: Tree) -> list[Path]:
    """Return a path of ranks for each node, as `Tree.from_choices` reads them."""
    paths: list[Path] = []
    for node, parent in enumerate(tree.parents):
        above = () if parent == ROOT else paths[parent]
        paths.append((*above, tree.children[parent + 1].index(node)))
    return paths


def rank_accuracies(texts: Sequence[TextRanks]) -> np.ndarray:
    """Return for each head the share of drafted tokens at each rank, (K, ranks), whose sums are top-k accuracies."""
    ranks = np.concatenate([text.ranks for text in texts])
    drafted = np.concatenate([text.drafted for text in texts]).sum(0)
    if not drafted.all():
        raise InputError(
            f"completions: expected some of more than {ranks.shape[1] + 1} tokens, which all heads draft in, found none"
        )
    most = max(max(text.most) for text in texts)
    return np.stack([(ranks == rank).sum(0) / drafted for rank in range(most)], axis=1)


def mean_acceptance_length(texts: Sequence[TextRanks], tree: Tree) -> float:
    """Return the replayed τ of a tree at T=0: tokens ÷ rounds."""
    return sum(map(len, texts)) / sum(text.rounds(tree) for text in texts)


def acceptance_estimate(texts: Sequence[TextRanks], tree: Tree) -> Estimate:
    """Return the replayed τ of a tree at T=0, with an interval over texts."""
    return ratio([len(text) for text in texts], [text.rounds(tree) for text in texts])


def path_masses(texts: Sequence[TextRanks], weights: Sequence[np.ndarray] | None = None) -> dict[Path, float]:
    """Return the summed weight of the starts that have each path of ranks; `weights` holds (N,) for each text, or 1s.

    The last token of a text does not count: a round that reaches it emits it whether or not it was drafted.
    """
    masses: dict[Path, float] = {}
    depth = texts[0].ranks.shape[1]
    base = max(max(text.most) for text in texts) + 1
    ranks, mass = [], []
    for i, text in enumerate(texts):
        start, offset = np.arange(len(text))[:, None], np.arange(depth)[None, :]
        ranks.append(np.where(start + offset < len(text) - 1, text.ranks, base).astype(np.int64))
        mass.append(np.ones(len(text)) if weights is None else weights[i])
    rows, row_masses = np.concatenate(ranks), np.concatenate(mass)
    # A path is coded as a number with one digit a rank, so that `unique` can count paths of one length.
    codes = np.zeros(len(rows), dtype=np.int64)
    alive = row_masses > 0
    for length in range(1, depth + 1):
        alive = alive & (rows[:, length - 1] < base)
        codes = codes * base + np.where(alive, rows[:, length - 1], 0)
        kinds, inverse = np.unique(codes[alive], return_inverse=True)
        sums = np.bincount(inverse, weights=row_masses[alive], minlength=len(kinds))
        for code, total in zip(kinds.tolist(), sums.tolist(), strict=True):
            path = tuple(code // base**index % base for index in reversed(range(length)))
            masses[path] = total
    return masses


def heaviest_tree(masses: Mapping[Path, float], nodes: int) -> Tree:
    """Return the tree with the greatest mass of at most `nodes` nodes; raise InputError for no nodes or no mass.

    A node needs its parent and its earlier siblings, which may be rarer than the node. Dynamic programming from the
    deepest paths up therefore divides each budget optimally between a path's children and its later siblings.
    """
    if nodes < 1:
        raise InputError(f"nodes: expected at least 1, found {nodes}")
    if not any(masses.values()):
        raise InputError("completions: expected tokens that a head names among its first, found none")
    # The prerequisites of each path: its ancestors, and the earlier siblings of every one of them.
    needed = {
        (*path[:depth], rank)
        for path, mass in masses.items()
        if mass > 0 and sum(path) + len(path) <= nodes
        for depth in range(len(path))
        for rank in range(path[depth] + 1)
    }
    if not needed:
        return Tree.chain(1)
    none = np.zeros(1)
    values: dict[Path, np.ndarray] = {}  # by path: the greatest mass of 0 … nodes nodes, from this sibling on
    below: dict[Path, np.ndarray] = {}  # by path: the number of these nodes that are its descendants
    for path in sorted(needed, key=lambda p: (len(p), p), reverse=True):
        children = values.get((*path, 0), none)
        later = values.get((*path[:-1], path[-1] + 1), none)
        best = np.full(min(len(children) + len(later) - 1, nodes), -np.inf)
        split = np.zeros(len(best), dtype=np.int64)
        for count in range(min(len(children), len(best))):
            end = min(count + len(later), len(best))
            sums = children[count] + later[: end - count]
            better = sums > best[count:end]
            best[count:end][better] = sums[better]
            split[count:end][better] = count
        values[path] = np.concatenate([none, masses.get(path, 0.0) + best])
        below[path] = split

    def take(path: Path, count: int) -> list[Path]:
        if count == 0:
            return []
        down = int(below[path][count - 1])
        return [path, *take((*path, 0), down), *take((*path[:-1], path[-1] + 1), count - 1 - down)]

    return Tree.from_choices(take((0,), int(values[(0,)].argmax())))


def independence_tree(texts: Sequence[TextRanks], nodes: int) -> Tree:
    """Return the tree of multiplied accuracies, as if heads were right independently (Cai et al. 2024, 2.3.3)."""
    accuracies = rank_accuracies(texts)
    if not accuracies[0, : max(nodes, 0)].any():
        return Tree.chain(1)
    return Tree.from_accuracies(accuracies.tolist(), nodes)


def search_tree(texts: Sequence[TextRanks], nodes: int, selection: Sequence[TextRanks] | None = None) -> Tree:
    """Search the tree with the greatest τ at T=0, of at most `nodes` nodes, by joint shares.

    All starts begin with equal weights. Each is then weighted by the share of the trees so far that start a round
    there; the average damps cycles. The independence tree is a candidate too, and the best on `selection` wins.
    """
    selection = texts if selection is None else selection
    weights = [np.ones(len(text)) for text in texts]
    candidates: list[Tree] = []
    for turn in range(1, MOST_CANDIDATES + 1):
        tree = heaviest_tree(path_masses(texts, weights), nodes)
        if candidates and tree == candidates[-1]:
            break
        candidates.append(tree)
        for text, text_weights in zip(texts, weights, strict=True):
            text_weights *= turn / (turn + 1)
            text_weights[text.starts(tree)] += 1 / (turn + 1)
    candidates.append(independence_tree(texts, nodes))
    return max(candidates, key=lambda tree: mean_acceptance_length(selection, tree))


@dataclass(frozen=True)
class Budget:
    """A searched tree, and its worth on one machine: `acceptance_length` is the replayed τ at T=0."""

    tree: Tree
    acceptance_length: float
    costs: RoundCosts  # the costs of a round with this tree; `overhead` includes its drafting

    @property
    def verification(self) -> float:
        """The seconds of a forward over the tree and its root."""
        return self.costs.verification(len(self.tree) + 1)

    @property
    def speedup(self) -> float:
        """The predicted speed-up over plain decoding, τ(n) · t(1) ÷ (t(n + 1) + o)."""
        return self.costs.speedup(self.acceptance_length, len(self.tree))


def search_budgets(
    texts: Sequence[TextRanks],
    nodes: Sequence[int],
    costs: Callable[[Sequence[Tree]], Sequence[RoundCosts]],
    selection: Sequence[TextRanks] | None = None,
) -> list[Budget]:
    """Search a tree of each size, except sizes that add nothing to a smaller one; the best has the greatest `speedup`.

    `costs` returns the costs of rounds with each tree, without a `draft_step`; τ is measured on `selection`.
    """
    trees: list[Tree] = []
    for size in sorted(nodes):
        tree = search_tree(texts, size, selection)
        if tree not in trees:
            trees.append(tree)
    lengths = [mean_acceptance_length(texts if selection is None else selection, tree) for tree in trees]
    return [Budget(*budget) for budget in zip(trees, lengths, costs(trees), strict=True)]
