"""What the round loop asks of a proposer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.decode.replay.texts import Replayed, WrittenText, replayed_by_walk
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import Tree


@dataclass(frozen=True)
class Proposal:
    """One row's draft, a chain or a tree, and the distributions that it was drawn from."""

    tokens: Tensor
    """Drafted tokens, (K,) int64, K ≥ 0: a proposer may draft fewer than it was asked for."""
    probabilities: Tensor | None
    """The distribution that each token was drawn from, (K, V) with the target's V: for a later sibling without the
    earlier siblings' tokens, renormalised, and all zero where nothing was left. None where the draft is deterministic,
    as every draft at T=0 is; siblings are distinct then."""
    tree: Tree
    """The shape; `Tree.chain(K)` for a chain."""
    confidence: Tensor | None = None
    """max q of the context that each token was drawn in, (K,); None where the proposer knows none."""


@dataclass(frozen=True)
class Task:
    """What is to be drafted for: the rows of one call of the decoder."""

    sampler: Sampler
    """The warping of the target's logits, to be applied to the drafter's own."""
    vocab_size: int
    """V, the width of the target's logits."""
    generators: Sequence[torch.Generator | None]
    """Each row's source of randomness; the global one if None."""
    max_length: int
    """Tokens of a row at most, prompt included."""
    draft_length: int
    """γ, the depth of a draft at most."""
    draw_siblings: bool
    """Whether siblings of a tree may be drawn under sampling; a lossy rule wants them deterministic."""
    compiled: bool
    """Whether to run models compiled, with static shapes."""
    target: PreTrainedModel | None = None
    """The target, for drafters that use weights of its."""


@dataclass(frozen=True)
class Outcome:
    """What became of one row's draft."""

    path: list[int]
    """The accepted nodes, from the root's child down; one token that was not drafted follows them."""
    logits: Tensor
    """The target's, (K + 1, V): the root's first, then the nodes'."""
    hidden: Tensor | None = None
    """The hidden states behind those logits, (K + 1, H), for a proposer that `wants_hidden`."""


class Proposer(Protocol):
    """Drafts tokens for the rows of a batch.

    The loop calls `start` once, then alternates `propose` and `commit`, and `select` where rows end. To add a
    proposer, implement these four methods (`StatelessProposer` has all but `propose`); nothing is registered. What
    `probabilities` says must be what was drawn from: the decoder is lossless only then. Whether a node is drafted may
    depend on what was drafted before it, never on its own token. A proposer whose attribute `wants_hidden` is true gets
    the target's hidden states with the outcomes.
    """

    def start(self, task: Task) -> int:
        """Begin with new rows. Return how many tokens a draft holds at most, chain or tree."""

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft what may follow each row's text.

        Args:
            contexts: the texts, B of (T_b,) int64.
            draft_lengths: how deep each row's draft may be, possibly 0.
        """

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Learn, for each row, what was accepted."""

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some of the rows alone."""


class StatelessProposer:
    """What a proposer that looks at the text alone has beside its `propose`."""

    def start(self, task: Task) -> int:
        """Keep the task; a chain of the draft length is the most it drafts."""
        self.task = task
        return task.draft_length

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""

    def select(self, rows: Sequence[int]) -> None:
        """Nothing is kept by row."""

    def replay(
        self: Proposer, task: Task, texts: Sequence[WrittenText], distributions: Sequence[Tensor] | None
    ) -> Replayed:
        """Replay certain drafts: see `draftsmith.decode.measurement.replay`."""
        self.start(task)

        def draft(context: Tensor, draft_length: int) -> tuple[Tensor, Tree]:
            proposal = self.propose([context], [draft_length])[0]
            if proposal.probabilities is not None:
                raise InputError(f"replay: expected certain drafts, found {type(self).__name__}, which draws them")
            return proposal.tokens, proposal.tree

        return replayed_by_walk(texts, distributions, draft)
