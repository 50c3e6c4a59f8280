"""Drafts that are trees, either of one fixed shape or grown anew each round.

Shape suffixes: B rows, F nodes of a frontier, K nodes, N nodes fed so far, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.forward import likeliest
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import Drafts, Proposal, Proposer, SiblingDraws
from draftsmith.decode.replay.ranks import TextRanks
from draftsmith.decode.sampling import Sampler, argmax, draw_rows, draw_siblings, scores_of_rows, uniforms
from draftsmith.decode.tree import ROOT, Level, Tree


@dataclass(frozen=True)
class DynamicTree:
    """A tree grown anew each round by cumulative draft probability (Li et al. 2024, arXiv 2406.16858, section 4).

    At each depth the `width` most probable nodes get their `width` most likely children. The `nodes` most probable
    nodes of the tree are verified. The tree is a function of the text alone, so it is lossless under sampling too:
    siblings are tried as one-hot drafts.
    """

    width: int = 4
    nodes: int = 12

    def __post_init__(self) -> None:
        if self.width < 1 or self.nodes < self.width:
            raise InputError(f"dynamic tree: expected 1 ≤ width ≤ nodes, found width {self.width}, nodes {self.nodes}")


DEEPEST = 8  # the depth of the deepest tree of a drafter without a limit of its own


class TreeProposer(Proposer):
    """A proposer that drafts any tree of fixed shape: `measurement.tree_search` finds the best one."""

    tree: Tree | DynamicTree | None  # the shape of its drafts; None for chains

    @property
    def depth(self) -> int:
        """The depth of its deepest tree."""
        return self.longest or DEEPEST

    def shape(self, depth: int) -> Tree:
        """Return the fixed shape of drafts down to this depth, a chain if it has none."""
        return self.tree.pruned(depth)[0] if isinstance(self.tree, Tree) else Tree.chain(depth)

    @abstractmethod
    def with_tree(self, tree: Tree) -> Self:
        """Return the same drafter with another tree."""

    @abstractmethod
    def ranks(
        self, target: PreTrainedModel, sequence: Tensor, prompt_length: int, hidden_NH: Tensor | None = None
    ) -> TextRanks:
        """Return the ranks of a text's tokens among the drafter's logits, from which follow any tree's counts at T=0.

        `sequence` is prompt and text, (T,) int64, with 1 ≤ `prompt_length` < T. `hidden_NH`, if known, are the target's
        hidden states at the text's N tokens; some drafters need them.
        """


LogitsAfter = Callable[[Level, Tensor], Tensor]
"""(a level, the tokens drafted so far (B, K)) → the drafter's logits after each of its P parents, (B, P, V), or
(B, 1, V) if these are alike for all parents."""
ScoresAfter = Callable[[Level, Tensor], Tensor]  # a `LogitsAfter` of processed logits
Uniforms = Callable[[Level, int, torch.dtype], Tensor]
"""(a level, numbers for each parent, dtype) → uniform numbers on [0, 1), (B, P × numbers)."""
SUPPORT = 1024
"""M: siblings are drawn from the drafter's M most likely tokens, renormalised, because a tree's distributions over the
whole vocabulary would take much memory. Flat drafters need a large M (docs/log/tensor-loop.md)."""


@dataclass(frozen=True)
class StaticDraft:
    """The tokens of all rows' trees of one shape."""

    tokens: Tensor  # (B, K) int64
    probabilities: Tensor | None = None  # the distributions of a chain's tokens, (B, K, V)
    siblings: tuple[Tensor, Tensor, Tensor] | None = None
    """The distributions of a tree's siblings: the M tokens of each of F distributions, (B, F, M), their probabilities,
    (B, F, M), and the index of each node's token among them, (B, K)."""
    confidence: Tensor | None = None  # of each node's context, (B, K): see `Proposal`
    block: Tensor | None = None  # see `Drafts`

    def drafts(self, tree: Tree, draft_lengths: Sequence[int]) -> list[Proposal]:
        """Return the rows' drafts, cut to their lengths."""
        if tree.is_chain:
            lengths = [min(k, self.tokens.shape[1]) for k in draft_lengths]
            return Drafts.chains(lengths, self.tokens, self.probabilities, self.confidence, self.block)
        row_siblings: Sequence[SiblingDraws | None] = [None] * len(draft_lengths)
        if self.siblings is not None:
            indices = distribution_indices(tree, self.siblings[0].shape[1])
            rows = zip(*self.siblings, strict=True)
            row_siblings = [SiblingDraws(support_FM, q_FM, indices, indices_K) for support_FM, q_FM, indices_K in rows]
        drafts = [
            Proposal(
                tokens,
                None if self.probabilities is None else self.probabilities[row],
                tree,
                None if self.confidence is None else self.confidence[row],
                row_siblings[row],
            ).pruned(k)
            for row, (tokens, k) in enumerate(zip(self.tokens.unbind(), draft_lengths, strict=True))
        ]
        # Unless nodes are in the order of their depths, a cut tree is not the first columns of the stacked tensors.
        if list(tree.depths) != sorted(tree.depths):
            return drafts
        return Drafts(drafts, self.tokens, self.probabilities, self.block)


def draft_static_tree(
    tree: Tree,
    samplers: Sequence[Sampler],
    contexts: Sequence[Tensor],
    draft_lengths: Sequence[int],
    generators: Sequence[torch.Generator | None],
    drawn: bool,
    confidence: bool,
    logits_after: LogitsAfter,
) -> list[Proposal]:
    """Draft a tree of one shape for each row, a depth at a time, and cut it to the row's draft length.

    If `drawn`, siblings are drawn without replacement, and the tokens of a chain are drawn; otherwise tokens are the
    most likely ones. Drafts hold max q if `confidence`. The other arguments are as for `choose`.
    """
    tokens = contexts[0].new_zeros(len(contexts), len(tree))
    known: Known = {}
    lengths = list(draft_lengths)

    def scores_after(level: Level, tokens: Tensor) -> Tensor:
        scores = _scores(tree, level, samplers, contexts, tokens, logits_after(level, tokens), known)
        if samplers[0].asks_user:
            for row, nothing in enumerate(scores.isneginf().all(-1).all(-1).tolist()):  # no token is allowed
                lengths[row] = min(lengths[row], level.depth) if nothing else lengths[row]
        return scores

    def draw_uniforms(level: Level, numbers: int, dtype: torch.dtype) -> Tensor:
        numbers *= len(level.parents)
        # A row spends the random numbers that it would spend alone: none below its own draft length.
        counts = [numbers * (level.depth < k) for k in draft_lengths]
        return uniforms(generators, counts, dtype, tokens.device)

    drawing = draw_uniforms if drawn else None
    draft = choose(tree, tree.levels(tokens.device), tokens, scores_after, drawing, confidence)
    return draft.drafts(tree, lengths)


def choose(
    tree: Tree,
    levels: Sequence[Level],
    tokens: Tensor,
    scores_after: ScoresAfter,
    uniforms: Uniforms | None,
    wants_confidence: bool = False,
) -> StaticDraft:
    """Choose the tokens of all rows' trees of one shape, a depth at a time, eagerly or in a program.

    The tokens, (B, K) int64, are written in place. Without `uniforms` they are the most likely ones.
    `wants_confidence` adds max q of each node's context.
    """
    siblings = _DrawnSiblings(tokens) if uniforms is not None and not tree.is_chain else None
    confidence: Tensor | None = None
    distributions: list[Tensor] = []  # of each depth of a drawn chain, (B, 1, V)
    for level in levels:
        scores_BFV, parents = scores_after(level, tokens), len(level.parents)
        if wants_confidence:
            confidence = scores_BFV.new_zeros(tokens.shape) if confidence is None else confidence
            likeliest_BP = scores_BFV.softmax(-1).amax(-1).expand(-1, parents)
            confidence.index_copy_(1, level.children, likeliest_BP.index_select(1, level.parent))
        # The W candidates of each parent: drawn siblings, one drawn token, or the most likely tokens.
        if siblings is not None and uniforms is not None:
            candidates_BPW = siblings.draw(level, scores_BFV, uniforms)
        elif uniforms is not None:
            distributions.append(scores_BFV.softmax(-1))
            u_B1 = uniforms(level, 1, torch.float64)
            candidates_BPW = draw_rows(distributions[-1][:, 0], u_B1[:, 0])[:, None, None]
        elif level.widest == 1:  # −1 marks logits that are not numbers
            best_BF = likeliest(scores_BFV).clamp(min=0) if torch.compiler.is_exporting() else argmax(scores_BFV)
            candidates_BPW = best_BF[..., None].expand(-1, parents, -1)
        else:
            candidates_BPW = scores_BFV.topk(level.widest).indices.expand(-1, parents, -1)
        # Each child takes its candidate, by its rank among its siblings.
        tokens.index_copy_(1, level.children, candidates_BPW.flatten(1).index_select(1, level.candidates))
    q_BKV = torch.cat(distributions, 1) if distributions else None
    return StaticDraft(tokens, q_BKV, None if siblings is None else siblings.drawn(), confidence)


def support_size(level: Level, vocab_size: int) -> int:
    """Return M, the number of tokens from which the siblings of a level are drawn."""
    return min(max(SUPPORT, level.widest), vocab_size)


def distribution_indices(tree: Tree, count: int) -> tuple[int, ...]:
    """Return the index of the distribution from which the children of the root and of each node are drawn.

    The `count` distributions belong to nodes with children, or to depths if all nodes of a depth share one.
    """
    indices, before = [0] * (len(tree) + 1), 0
    levels = tree.levels(torch.device("cpu"))
    alike = count == len(levels)
    for level in levels:
        for index, parent in enumerate(level.parents):
            indices[parent + 1] = before + (0 if alike else index)
        before += 1 if alike else len(level.parents)
    return tuple(indices)


class _DrawnSiblings:
    """Draws the siblings of all rows' trees, a depth at a time, and records their distributions."""

    def __init__(self, tokens_BK: Tensor):
        self._indices = torch.zeros_like(tokens_BK)
        self._q: list[Tensor] = []  # of each depth, (B, F, M)
        self._supports: list[Tensor] = []  # the M tokens of each, (B, F, M)

    def draw(self, level: Level, scores_BFV: Tensor, uniforms: Uniforms) -> Tensor:
        """Return the W siblings of each parent, (B, P, W)."""
        parents, size = len(level.parents), support_size(level, scores_BFV.shape[-1])
        best = scores_BFV.topk(size)
        # Renormalised over the support; verification uses the same q, so that this stays lossless.
        q_BFM, support_BFM = best.values.softmax(-1), best.indices
        u = uniforms(level, size, q_BFM.dtype)
        order_BPW = draw_siblings(q_BFM, u.view(-1, parents, size), level.widest)
        self._indices.index_copy_(1, level.children, order_BPW.flatten(1).index_select(1, level.candidates))
        self._q.append(q_BFM)
        self._supports.append(support_BFM)
        return support_BFM.expand(-1, parents, -1).gather(-1, order_BPW)

    def drawn(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the distributions of the siblings: see `StaticDraft`."""
        return torch.cat(self._supports, 1), torch.cat(self._q, 1), self._indices


Known = dict[int, tuple[Sequence[Tensor], Tensor]]  # node → all rows' texts down to it, and the scores after them


def _scores(
    tree: Tree,
    level: Level,
    samplers: Sequence[Sampler],
    contexts: Sequence[Tensor],
    tokens: Tensor,
    logits_BFV: Tensor,
    known: Known,
) -> Tensor:
    """Return the processed logits after each parent of a level, (B, P, V), or (B, 1, V) if they are alike.

    `known` holds what the levels above had, and gets this one's.
    """
    if samplers[0].context_free:
        return samplers[0].scores(logits_BFV.flatten(0, 1), []).view(logits_BFV.shape)
    # Processors such as penalties read the text, which differs by parent.
    alike = logits_BFV.shape[1] == 1
    for index, parent in enumerate(level.parents):
        texts = contexts
        if parent != ROOT:
            (before, scores_BV), tokens_B1 = known[tree.parents[parent]], tokens[:, parent, None]
            rows = zip(samplers, before, tokens_B1, scores_BV.gather(1, tokens_B1), strict=True)
            texts = [sampler.after(*args) for sampler, *args in rows]
        known[parent] = texts, scores_of_rows(samplers, logits_BFV[:, 0 if alike else index], texts)
    return torch.stack([known[parent][1] for parent in level.parents], 1)


def grow_trees(trees: Sequence["GrowingTree"], samplers: Sequence[Sampler], logits_BFV: Tensor) -> None:
    """Give each node of all rows' frontiers its most likely children, from the logits after it."""
    scores_BFV = torch.stack([tree.scores(*args) for tree, *args in zip(trees, samplers, logits_BFV, strict=True)])
    width = trees[0].shape.width
    best = scores_BFV.log_softmax(-1).topk(width)
    # One transfer for probabilities and ids, in double precision, which represents ids exactly.
    read_BFK = torch.cat([best.values.double(), best.indices.double()], -1).tolist()
    for tree, read_FK in zip(trees, read_BFK, strict=True):
        tree.grow([values[:width] for values in read_FK], [list(map(int, values[width:])) for values in read_FK])


class GrowingTree:
    """One row's tree as it grows after a text, (T,)."""

    def __init__(self, context: Tensor, shape: DynamicTree):
        self.context, self.shape = context, shape
        self.parents: list[int] = []
        self.tokens: list[int] = []
        self.weights: list[float] = []  # log of the cumulative probability
        self.confidence: list[float] = []  # log of max q in the node's context
        self.frontier = [ROOT]
        self.slots: dict[int, int] = {}  # the slots after the text of the nodes that were fed
        self._newest = 0  # the first node of the greatest depth

    def scores(self, sampler: Sampler, logits_FV: Tensor) -> Tensor:
        """Return the processed logits after each node of the frontier, (F, V)."""
        texts = [self.context] * len(logits_FV)
        if not sampler.context_free:
            paths = [self.context.new_tensor([self.tokens[n] for n in self._path(node)]) for node in self.frontier]
            weights = [0.0 if node == ROOT else self.weights[node] for node in self.frontier]
            texts = [sampler.after(self.context, *args) for args in zip(paths, weights, strict=True)]
        return sampler.scores(logits_FV, texts)

    def grow(self, log_q_FW: Sequence[Sequence[float]], tokens_FW: Sequence[Sequence[int]]) -> None:
        """Give each node of the frontier its most likely children."""
        self._newest = len(self.parents)
        for node, values, indices in zip(self.frontier, log_q_FW, tokens_FW, strict=True):
            before = 0.0 if node == ROOT else self.weights[node]
            self.parents += [node] * self.shape.width
            self.tokens += indices
            self.weights += [before + value for value in values]
            self.confidence += [values[0]] * self.shape.width

    def choose_frontier(self) -> list[int]:
        """Take the most probable of the newest nodes as the next frontier, and return their tokens."""
        self.frontier = self._most_probable(self._newest, len(self.weights), self.shape.width)
        self.slots |= {node: len(self.slots) + f for f, node in enumerate(self.frontier)}
        return [self.tokens[node] for node in self.frontier]

    def visible(self) -> Tensor:
        """Return the mask of the fed nodes to which each node of the frontier attends, (F, N) bool."""
        visible = torch.zeros(len(self.frontier), len(self.slots), dtype=torch.bool)
        for f, node in enumerate(self.frontier):
            visible[f, [self.slots[ancestor] for ancestor in self._path(node)]] = True
        return visible

    def draft(self, draft_length: int) -> tuple[Proposal, list[int]]:
        """Return the most probable nodes of the first `draft_length` depths, and their slots, or −1."""
        width = self.shape.width
        allowed = width + (draft_length - 1) * width**2 if draft_length else 0  # the nodes of these depths
        # A child is never more probable than its parent, so the most probable nodes form a tree.
        nodes = self._most_probable(0, min(allowed, len(self.weights)), self.shape.nodes)
        new = {node: i for i, node in enumerate(nodes)} | {ROOT: ROOT}
        tree = Tree(tuple(new[self.parents[node]] for node in nodes))
        confidence = torch.tensor([self.confidence[node] for node in nodes], device=self.context.device).exp()
        tokens = self.context.new_tensor([self.tokens[node] for node in nodes])
        return Proposal(tokens, None, tree, confidence), [self.slots.get(node, -1) for node in nodes]

    def _most_probable(self, first: int, end: int, count: int) -> list[int]:
        """Return the `count` nodes of greatest weight among `first` … `end` − 1, ascending."""
        return sorted(sorted(range(first, end), key=lambda node: (-self.weights[node], node))[:count])

    def _path(self, node: int) -> list[int]:
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]
