"""Token trees: several continuations verified in one forward of the target; a chain is a tree of width one.

Parents are numbered before their children. The root is the text's last token, which was emitted but not fed yet: a
block of K drafted tokens is fed as 1 + K positions, the root first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from draftsmith.decode.errors import InputError

ROOT = -1


@dataclass(frozen=True)
class Level:
    """The nodes of one depth that have children, on a device: P parents, C children, at most W = `widest` a parent."""

    depth: int
    parents: tuple[int, ...]  # the parents' numbers; `ROOT` alone at depth 0
    fed: Tensor  # the parents on the device, (P,); empty at depth 0, whose parent is the text's last token
    paths: Tensor  # the path from the root's child to each parent, (P, depth)
    visible: Tensor  # the parents up to this depth, N of them, that each parent attends to, (P, N) bool
    children: Tensor
    parent: Tensor  # each child's index among the parents, (C,)
    candidates: Tensor
    """Each child's index among the W best candidates of all parents, (C,): its parent's index · W + its rank."""
    widest: int


@dataclass(frozen=True)
class Tree:
    """The shape of a draft: each node's parent, `ROOT` after the text; an `InputError` if one follows its child."""

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise InputError(f"tree: expected node {node}'s parent among −1…{node - 1}, found {parent}")

    def __len__(self) -> int:
        return len(self.parents)

    def __hash__(self) -> int:
        return self._hash  # a round looks it up several times

    @cached_property
    def _hash(self) -> int:
        return hash(self.parents)

    @classmethod
    def chain(cls, length: int) -> "Tree":
        """Return the tree of width one."""
        return _chain(length)

    @classmethod
    def from_choices(cls, choices: Sequence[Sequence[int]]) -> "Tree":
        """Build a tree from paths of ranks (the notation of Cai et al. 2024): a node is its path, such as (0, 2).

        Rank r names the drafter's (r + 1)-th most likely token, or under sampling its (r + 1)-th draw. Siblings are
        ordered by rank. Raises an InputError for a path that occurs twice, or lacks its parent or an earlier sibling.
        """
        paths = sorted((tuple(path) for path in choices), key=lambda path: (len(path), path))
        index = {path: i for i, path in enumerate(paths)}
        if len(index) != len(paths):
            raise InputError(f"tree: expected every path once, found {len(paths) - len(index)} of them again")
        for path in paths:
            if not path or min(path) < 0:
                raise InputError(f"tree: expected paths of ranks from 0 on, found {list(path)}")
            if len(path) > 1 and path[:-1] not in index:
                raise InputError(f"tree: expected the parent {list(path[:-1])} of {list(path)} too, found none")
            if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in index:
                raise InputError(f"tree: expected the sibling {[*path[:-1], path[-1] - 1]} of {list(path)} too")
        return cls(tuple(index.get(path[:-1], ROOT) for path in paths))

    @classmethod
    def from_accuracies(cls, accuracies: Sequence[Sequence[float]], nodes: int) -> "Tree":
        """Grow the tree of the greatest expected accepted length (Cai et al. 2024, section 2.3.3).

        `accuracies` are, for each depth and rank, the share of contexts whose next token is the drafter's candidate of
        that rank, in [0, 1] and not all 0 at depth one. At most `nodes` nodes are grown, fewer where more add nothing.
        """
        if nodes < 1:
            raise InputError(f"nodes: expected at least 1, found {nodes}")
        if any(not 0 <= a <= 1 for ranks in accuracies for a in ranks):
            raise InputError(f"accuracies: expected values between 0 and 1, found {accuracies}")

        @cache
        def grow(depth: int, rank: int, nodes: int) -> tuple[float, int]:
            """Return the best expected length from a rank on, and the nodes below that rank; −1 excludes the rank."""
            if nodes == 0 or depth == len(accuracies) or rank == len(accuracies[depth]):
                return 0.0, -1
            # Entry b + 1 is for b nodes below this rank, and the rest for its later siblings. The paper adds the most
            # probable node again and again, which is best where accuracies fall with the rank; measured ones need not.
            lengths = [0.0] + [
                accuracies[depth][rank] * (1 + grow(depth + 1, 0, below)[0])
                + grow(depth, rank + 1, nodes - 1 - below)[0]
                for below in range(nodes)
            ]
            best = max(range(nodes + 1), key=lambda i: lengths[i])
            return lengths[best], best - 1

        # Follow the best division down from the root.
        def paths(above: tuple[int, ...], rank: int, nodes: int) -> list[tuple[int, ...]]:
            _, below = grow(len(above), rank, nodes)
            if below < 0:
                return []
            node = (*above, rank)
            return [node, *paths(node, 0, below), *paths(above, rank + 1, nodes - 1 - below)]

        choices = paths((), 0, nodes)
        if not choices:
            raise InputError("accuracies: expected a positive one for the first token, found none")
        return cls.from_choices(choices)

    @cached_property
    def is_chain(self) -> bool:
        """True if every node has one child at most."""
        return self.parents == tuple(range(-1, len(self) - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Each node's distance from the root, which gives its position; 1 for the first drafted token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        """The length of the longest path, 0 for an empty tree: the most tokens that a round can accept."""
        return max(self.depths, default=0)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The greatest number of siblings at each depth, from depth 1."""
        widths = [0] * self.depth
        for depth, children in zip((0, *self.depths), self.children, strict=True):
            if children:
                widths[depth] = max(widths[depth], len(children))
        return tuple(widths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children in their order of verification: entry 0 holds the root's, entry i + 1 those of node i."""
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            children[parent + 1].append(node)
        return tuple(map(tuple, children))

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root's child down to `node`; empty for the root."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    @cached_property
    def visible(self) -> Tensor:
        """The tokens of the block that each one attends to, its ancestors and itself, (K + 1, K + 1) bool."""
        visible = torch.eye(len(self) + 1, dtype=torch.bool)
        visible[:, 0] = True
        for node, parent in enumerate(self.parents):
            visible[node + 1] |= visible[parent + 1]
        return visible

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `visible` and the depths of root and nodes, (K + 1,), on a device; cached."""
        if device not in self._on_devices:
            self._on_devices[device] = self.visible.to(device), torch.tensor((0, *self.depths), device=device)
        return self._on_devices[device]

    def levels(self, device: torch.device) -> tuple[Level, ...]:
        """Return the depths that have children, from the root, indexed on a device; cached."""
        if device not in self._levels:
            self._levels[device] = tuple(self._level(depth, device) for depth in range(self.depth))
        return self._levels[device]

    def _level(self, depth: int, device: torch.device) -> Level:
        # `fed` are the parents down to this depth, in the order in which a drafter feeds them.
        inner = [node for node in range(ROOT, len(self)) if self.children[node + 1]]
        depths = (0, *self.depths)
        parents = [node for node in inner if depths[node + 1] == depth]
        fed = sorted((node for node in inner if 0 < depths[node + 1] <= depth), key=lambda node: depths[node + 1])
        widest = max(len(self.children[parent + 1]) for parent in parents)
        children = [
            (child, i, i * widest + rank)
            for i, parent in enumerate(parents)
            for rank, child in enumerate(self.children[parent + 1])
        ]
        index = torch.tensor(children, device=device).T
        visible = self.visible[[parent + 1 for parent in parents]][:, [node + 1 for node in fed]]
        nodes = torch.tensor(parents if depth else [], dtype=torch.long, device=device)
        paths = torch.tensor([self.path(parent) for parent in parents], dtype=torch.long, device=device)
        return Level(depth, tuple(parents), nodes, paths, visible.to(device), index[0], index[1], index[2], widest)

    @cached_property
    def _levels(self) -> dict[torch.device, tuple[Level, ...]]:
        return {}

    @cached_property
    def _on_devices(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    def pruned(self, depth: int) -> "tuple[Tree, list[int]]":
        """Return the tree without the nodes deeper than `depth`, and the remaining nodes."""
        if depth >= self.depth:
            return self, list(range(len(self)))
        nodes = [node for node, d in enumerate(self.depths) if d <= depth]
        new = {node: i for i, node in enumerate(nodes)} | {ROOT: ROOT}
        return Tree(tuple(new[self.parents[node]] for node in nodes)), nodes


@lru_cache(maxsize=64)
def _chain(length: int) -> Tree:
    return Tree(tuple(range(-1, length - 1)))


def masks_of(trees: Sequence[Tree], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens of its block that each token attends to, (1 + K, 1 + K) bool, and all depths, (1 + K,) int64.

    Both get a first axis B, unless one tree of K = `width` nodes is all rows'. Padding sees only itself.
    """
    if all(tree is trees[0] for tree in trees) and len(trees[0]) == width:
        return trees[0].on(device)
    visible = torch.eye(width + 1, dtype=torch.bool).repeat(len(trees), 1, 1)
    depths = torch.zeros(len(trees), width + 1, dtype=torch.long)
    for row, tree in enumerate(trees):
        size = len(tree) + 1
        visible[row, :size, :size] = tree.visible
        depths[row, 1:size] = torch.tensor(tree.depths)
    return visible.to(device), depths.to(device)


def searched_tree(config: Any, key: str) -> Tree | None:
    """Return the tree whose choices a drafter's config has under `key`; None for chains, an `InputError` if invalid."""
    choices = getattr(config.get_text_config(), key, None)
    if choices is None:
        return None
    try:
        tree = Tree.from_choices(choices)
    except TypeError as error:
        raise InputError(f"{key}: expected lists of ranks, found {choices!r}") from error
    if not len(tree):
        raise InputError(f"{key}: expected at least one node, found none")
    return tree
