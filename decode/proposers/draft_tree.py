"""Drafts that are trees: of one shape for every round, or grown anew each round.

Shape suffixes: B rows, F nodes of a frontier, K nodes, N nodes fed so far, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import Proposal
from draftsmith.decode.sampling import Sampler, draw_without_replacement, scores_of_rows
from draftsmith.decode.tree import ROOT, Tree


@dataclass(frozen=True)
class DynamicTree:
    """A tree grown anew each round by cumulative draft probability (EAGLE-2, Li et al. 2024, sections 4.1 and 4.2).

    At each depth the `width` most probable nodes get their `width` most likely children; of all nodes the `nodes` most
    probable ones are verified. It is a function of the text alone, hence lossless under sampling too (siblings are
    tried as one-hot drafts).
    """

    width: int = 4
    nodes: int = 12

    def __post_init__(self) -> None:
        if self.width < 1 or self.nodes < self.width:
            raise InputError(f"dynamic tree: expected 1 ≤ width ≤ nodes, found width {self.width}, nodes {self.nodes}")


LogitsAfter = Callable[[list[int], Tensor], Tensor]
"""(nodes of one depth, the tokens drafted so far (B, K)) → the drafter's logits after each of them, (B, F, V), or
(B, 1, V) where they are alike for all nodes of a depth."""


def draft_static_tree(
    tree: Tree,
    samplers: Sequence[Sampler],
    contexts: Sequence[Tensor],
    draft_lengths: Sequence[int],
    generators: Sequence[torch.Generator | None],
    drawn: bool,
    wants_confidence: bool,
    logits_after: LogitsAfter,
) -> list[Proposal]:
    """Draft a tree of one shape for each row, a depth at a time, and cut it to the row's draft length.

    Args:
        tree: the shape, as deep as the greatest draft length.
        samplers: the rows' warpings.
        contexts: the texts, B of (T_b,).
        draft_lengths: nothing is drawn deeper, so that a row spends the random numbers that it would spend alone.
        generators: the rows' sources of randomness.
        drawn: draw siblings without replacement; else they are the most likely tokens.
        wants_confidence: tell max q of each node's context.
        logits_after: the drafter.
    """
    tokens, context_free = contexts[0].new_zeros(len(contexts), len(tree)), samplers[0].context_free
    confidence: Tensor | None = None
    distributions: Tensor | None = None
    for depth in range(tree.depth):
        parents = [n for n, d in enumerate((0, *tree.depths), ROOT) if d == depth and tree.children[n + 1]]
        widest = max(len(tree.children[parent + 1]) for parent in parents)
        logits_BFV = logits_after(parents, tokens)
        alike = context_free and logits_BFV.shape[1] == 1  # one distribution for all nodes of this depth
        for f, parent in enumerate(parents):
            if f == 0 or not alike:
                path = [] if context_free else tree.path(parent)
                texts = [torch.cat([c, t[path]]) for c, t in zip(contexts, tokens, strict=True)] if path else contexts
                scores = scores_of_rows(samplers, logits_BFV[:, f if logits_BFV.shape[1] > 1 else 0], texts)
                q = scores.softmax(-1) if drawn or wants_confidence else None
                top = None if drawn else scores.topk(widest).indices
            children = list(tree.children[parent + 1])
            if q is not None and wants_confidence:
                confidence = q.new_zeros(tokens.shape) if confidence is None else confidence
                confidence[:, children] = q.amax(-1, keepdim=True)
            if top is not None:
                tokens[:, children] = top[:, : len(children)]
            elif q is not None:
                if distributions is None:
                    distributions = q.new_zeros(*tokens.shape, q.shape[-1])
                for row, generator in enumerate(generators):
                    if depth < draft_lengths[row]:
                        siblings = draw_without_replacement(q[row], len(children), generator)
                        tokens[row, children], distributions[row, children] = siblings
    drafts = [
        Proposal(
            tokens[row],
            None if distributions is None else distributions[row],
            tree,
            None if confidence is None else confidence[row],
        )
        for row in range(len(contexts))
    ]
    return [draft.pruned(k) for draft, k in zip(drafts, draft_lengths, strict=True)]


class GrowingTree:
    """One row's tree as it grows: its nodes in the order in which they were found.

    Args:
        context: the row's text, (T,).
        shape: how it grows.
    """

    def __init__(self, context: Tensor, shape: DynamicTree):
        self.context, self.shape = context, shape
        self.parents: list[int] = []
        self.tokens: list[int] = []
        self.weights: list[float] = []  # log of the cumulative probability
        self.confidence: list[float] = []  # log of max q in the context that the node was drafted in
        self.frontier = [ROOT]
        self.slots: dict[int, int] = {}  # where the nodes that were fed lie behind the text
        self._newest = 0

    def grow(self, sampler: Sampler, logits_FV: Tensor) -> None:
        """Give each node of the frontier its most likely children, from the logits after it."""
        texts = [self.context] * len(logits_FV)
        if not sampler.context_free:
            paths = ([self.tokens[node] for node in self._path(node)] for node in self.frontier)
            texts = [torch.cat([self.context, self.context.new_tensor(path)]) for path in paths]
        best = sampler.scores(logits_FV, texts).log_softmax(-1).topk(self.shape.width)
        self._newest = len(self.parents)
        for node, values, indices in zip(self.frontier, best.values.tolist(), best.indices.tolist(), strict=True):
            before = 0.0 if node == ROOT else self.weights[node]
            self.parents += [node] * self.shape.width
            self.tokens += indices
            self.weights += [before + value for value in values]
            self.confidence += [values[0]] * self.shape.width

    def choose_frontier(self) -> list[int]:
        """Take the most probable of the newest nodes to be fed next; return their tokens."""
        self.frontier = self._most_probable(self._newest, len(self.weights), self.shape.width)
        self.slots |= {node: len(self.slots) + f for f, node in enumerate(self.frontier)}
        return [self.tokens[node] for node in self.frontier]

    def visible(self) -> Tensor:
        """Return which of the nodes fed so far each node of the frontier attends to, (F, N) bool."""
        visible = torch.zeros(len(self.frontier), len(self.slots), dtype=torch.bool)
        for f, node in enumerate(self.frontier):
            visible[f, [self.slots[ancestor] for ancestor in self._path(node)]] = True
        return visible

    def draft(self, draft_length: int) -> tuple[Proposal, list[int]]:
        """Return the most probable nodes of the first `draft_length` depths, and the slots that they lie in, or −1.

        A child is never more probable than its parent, so that they are a tree.
        """
        width = self.shape.width
        allowed = width + (draft_length - 1) * width**2 if draft_length else 0  # nodes that were found at these depths
        kept = self._most_probable(0, min(allowed, len(self.weights)), self.shape.nodes)
        new = {node: i for i, node in enumerate(kept)} | {ROOT: ROOT}
        tree = Tree(tuple(new[self.parents[node]] for node in kept))
        confidence = torch.tensor([self.confidence[node] for node in kept], device=self.context.device).exp()
        tokens = self.context.new_tensor([self.tokens[node] for node in kept])
        return Proposal(tokens, None, tree, confidence), [self.slots.get(node, -1) for node in kept]

    def _most_probable(self, first: int, end: int, count: int) -> list[int]:
        """Return the `count` nodes of greatest weight among `first` … `end` − 1, in the order of their numbers."""
        return sorted(sorted(range(first, end), key=lambda node: (-self.weights[node], node))[:count])

    def _path(self, node: int) -> list[int]:
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]
