"""Drafts that are trees of one fixed shape.

Shape suffixes: B rows, F distributions of a level, K nodes, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.forward import likeliest
from draftsmith.decode.proposers.base import Drafts, Proposal, Proposer, SiblingDraws
from draftsmith.decode.replay.ranks import TextRanks
from draftsmith.decode.sampling import Sampler, argmax, draw_rows, draw_siblings, scores_of_rows, uniforms
from draftsmith.decode.tree import ROOT, Level, Tree

DEEPEST = 8  # the depth of the deepest tree of a drafter without a limit of its own


class TreeProposer(Proposer):
    """A proposer that drafts any tree of fixed shape: `measurement.tree_search` finds the best one."""

    tree: Tree | None  # the shape of its drafts; None for chains

    @property
    def depth(self) -> int:
        """The depth of its deepest tree."""
        return self.longest or DEEPEST

    def shape(self, depth: int) -> Tree:
        """Return the fixed shape of drafts down to this depth, a chain if it has none."""
        return Tree.chain(depth) if self.tree is None else self.tree.pruned(depth)[0]

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
