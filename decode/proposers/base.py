"""Proposers: what drafts, and the drafts and outcomes that the round loop exchanges with it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache import padded
from draftsmith.decode.errors import InputError
from draftsmith.decode.replay.batch_replay import BatchReplay, replay_certain
from draftsmith.decode.replay.texts import Distributions, WrittenText
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import Tree


@dataclass(frozen=True)
class SiblingDraws:
    """What the siblings of one row's tree were drawn from, without replacement: q on the tokens that it may name.

    Shape suffixes: F distributions, M tokens of each, K nodes.
    """

    support: Tensor
    """The tokens, (F, M) int64, each once."""
    q: Tensor
    """Their probabilities, (F, M), which sum to 1."""
    of: tuple[int, ...]
    """Which distribution the children of the root and of each node were drawn from, K + 1 of them."""
    places: Tensor
    """Each node's token's place in the support of its parent's distribution, (K,)."""

    def to(self, device: torch.device) -> "SiblingDraws":
        """Return them on a device."""
        return SiblingDraws(self.support.to(device), self.q.to(device), self.of, self.places.to(device))

    def dense(self, tree: Tree, vocab_size: int) -> Tensor:
        """Return what each node's token was drawn from over the whole vocabulary, (K, V): `Proposal.probabilities`."""
        rows = self.q.new_zeros(len(tree), vocab_size)
        for parent, siblings in enumerate(tree.children):
            q_M = self.q[self.of[parent]].clone()
            for node in siblings:
                rows[node, self.support[self.of[parent]]] = q_M / q_M.sum().clamp(min=torch.finfo(q_M.dtype).tiny)
                q_M[self.places[node]] = 0.0
        return rows


@dataclass(frozen=True)
class Proposal:
    """One row's draft, a chain or a tree, and the distributions that it was drawn from."""

    tokens: Tensor
    """Drafted tokens, (K,) int64, K ≥ 0: a proposer may draft fewer than the draft length."""
    probabilities: Tensor | None
    """The distribution that each token was drawn from, (K, V) with the target's V: for a later sibling without the
    earlier siblings' tokens, renormalised, and all zero where nothing was left. None where the draft is deterministic,
    as every draft at T=0 is, and siblings are distinct then, or where `siblings` says what was drawn."""
    tree: Tree
    """The shape; `Tree.chain(K)` for a chain."""
    confidence: Tensor | None = None
    """max q of the context that each token was drawn in, (K,); None where the proposer knows none."""
    siblings: SiblingDraws | None = None
    """What a tree's siblings were drawn from, in place of `probabilities`."""
    source: int = 0
    """Which drafter of several that take turns drafted it."""

    def dense(self, vocab_size: int) -> "Proposal":
        """Return the draft with `probabilities` in place of `siblings`."""
        if self.siblings is None:
            return self
        return replace(self, probabilities=self.siblings.dense(self.tree, vocab_size), siblings=None)

    def to(self, device: torch.device) -> "Proposal":
        """Return the draft on a device."""
        q, confidence, siblings = self.probabilities, self.confidence, self.siblings
        return Proposal(
            self.tokens.to(device),
            None if q is None else q.to(device),
            self.tree,
            None if confidence is None else confidence.to(device),
            None if siblings is None else siblings.to(device),
            self.source,
        )

    def pruned(self, depth: int) -> "Proposal":
        """Return the draft without what lies deeper than `depth`."""
        tree, nodes = self.tree.pruned(depth)
        if tree is self.tree:
            return self
        q, confidence, siblings = self.probabilities, self.confidence, self.siblings
        if siblings is not None:
            of = tuple(siblings.of[place] for place in (0, *(node + 1 for node in nodes)))
            siblings = SiblingDraws(siblings.support, siblings.q, of, siblings.places[nodes])
        return Proposal(
            self.tokens[nodes],
            None if q is None else q[nodes],
            tree,
            None if confidence is None else confidence[nodes],
            siblings,
            self.source,
        )


class Drafts(list[Proposal]):
    """The drafts of a batch, for a proposer that has their tensors together.

    Args:
        proposals: a draft for each row.
        tokens: all of their tokens, (B, K); what is beyond a shorter draft may be anything.
        probabilities: all of their distributions, (B, K, V).
        block: each text's last token and then `tokens`, (B, 1 + K), where they are at hand.
    """

    def __init__(
        self, proposals: Sequence[Proposal], tokens: Tensor, probabilities: Tensor | None, block: Tensor | None = None
    ):
        super().__init__(proposals)
        self.tokens, self.probabilities, self.block = tokens, probabilities, block

    @classmethod
    def chains(
        cls, lengths: Sequence[int], tokens_BK: Tensor, q_BKV: Tensor | None, confidence_BK: Tensor | None
    ) -> "Drafts":
        """Return chains of these lengths, K at most; q is None where they are deterministic."""
        proposals = [
            Proposal(
                tokens_BK[row, :k],
                q_BKV[row, :k] if k and q_BKV is not None else None,
                Tree.chain(k),
                None if confidence_BK is None else confidence_BK[row, :k],
            )
            for row, k in enumerate(lengths)
        ]
        return cls(proposals, tokens_BK, q_BKV)


def ends_of(texts: Sequence[Tensor], count: int) -> Tensor:
    """Return the last tokens of texts, B of (T_b,) → (B, count)."""
    ends = [text[-count:] for text in texts]
    return torch.stack(ends) if len(ends) > 1 else ends[0][None]


def tokens_of(proposals: Sequence[Proposal], width: int) -> Tensor:
    """Return the drafted tokens of a batch, (B, width); zeros beyond a shorter draft where they are not at hand."""
    if isinstance(proposals, Drafts) and proposals.tokens.shape[1] == width:
        return proposals.tokens
    return padded([proposal.tokens for proposal in proposals], width)


def probabilities_of(proposals: Sequence[Proposal], width: int) -> Tensor | None:
    """Return the distributions that chains were drawn from, (B, width, V); None where all drafts are deterministic.

    Those of a deterministic draft among others are one-hot.
    """
    if isinstance(proposals, Drafts) and (proposals.probabilities is None or proposals.probabilities.shape[1] == width):
        return proposals.probabilities
    given = [proposal.probabilities for proposal in proposals if proposal.probabilities is not None]
    if not given:
        return None
    together = given[0].new_zeros(len(proposals), width, given[0].shape[1])
    for row, proposal in zip(together, proposals, strict=True):
        if proposal.probabilities is None:
            row[: len(proposal.tokens)].scatter_(1, proposal.tokens[:, None], 1.0)
        else:
            row[: len(proposal.tokens)] = proposal.probabilities
    return together


@dataclass(frozen=True)
class DraftTask:
    """The rows of one call of the decoder, to draft for."""

    sampler: Sampler
    """The warping of the target's logits, to be applied to the drafter's own; where rows differ, the first row's."""
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
    """Whether to run models compiled."""
    target: PreTrainedModel | None = None
    """The target, for drafters that use its weights."""
    fixed_length: bool = False
    """Whether each draft is as deep as `draft_length`, as far as there is room."""
    round_length: int = 0
    """γ of others that take turns with this drafter, where theirs is greater: its cache may lack as much."""
    row_samplers: Sequence[Sampler] = ()
    """Each row's warping, where they differ: where a processor counts from the prompt's end or looks at the row."""

    @property
    def samplers(self) -> Sequence[Sampler]:
        """Each row's warping."""
        return self.row_samplers or [self.sampler] * len(self.generators)


@dataclass(frozen=True)
class Outcome:
    """The result of one row's draft."""

    path: list[int]
    """The accepted nodes, from the root's child down; one token that was not drafted follows them."""
    logits: Tensor
    """The target's, (K + 1, V): the root's first, then the nodes'."""
    hidden: Tensor | None = None
    """The hidden states behind those logits, (K + 1, H), for a proposer that `wants_hidden`."""
    features: Tensor | None = None
    """For a proposer that `wants_features`: the target's, of the root and the accepted nodes, (1 + len(path), F)."""
    prompt_features: Tensor | None = None
    """The same of the tokens before the root, (T − 1, F), in a text's first round: large, do not hold on to them."""


class Proposer(ABC):
    """Drafts tokens for the rows of a batch.

    The loop calls `start` once, then alternates `propose` and `commit`, and calls `select` where rows end. To add a
    proposer, implement `propose` and what else it needs; nothing is registered. Three rules keep the decoder lossless:
    `probabilities` must be what the tokens were drawn from; whether a node is drafted may depend on what was drafted
    before it, but never on its own token; and the random numbers come from the task's generators.
    """

    wants_hidden: bool = False
    """Whether outcomes hold the target's hidden states."""
    wants_features: Sequence[int] = ()
    """Depths in the target's layers, ascending, whose features outcomes hold, one behind the other: F = H × their
    number. A proposer wants these or hidden states, not both."""
    at_once: bool = False
    """Whether a draft costs about the same however long it is."""
    positions: int | None = None
    """The longest text after which anything is drafted, in tokens; None where there is no such limit."""
    longest: int | None = None
    """The greatest depth of a draft, whatever the draft length; None where there is no such limit."""

    def start(self, task: DraftTask) -> int:
        """Begin with new rows. Return the greatest number of tokens of a draft, chain or tree."""
        self.task = task
        return task.draft_length

    @abstractmethod
    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft what may follow each row's text.

        Args:
            contexts: the texts, B of (T_b,) int64; `decode.rows.host_tokens` gives their tokens on the host.
            draft_lengths: how deep each row's draft may be, possibly 0.
        """

    def nodes(self, draft_length: int) -> int:
        """Return how many tokens a draft of this depth has at most: what a `Plan` prices a round by."""
        return draft_length

    def commit(self, outcomes: Sequence[Outcome]) -> None:  # noqa: B027
        """Learn what became of each row's draft."""

    def select(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Drop all but these rows."""

    def replay_refusal(self, do_sample: bool) -> str | None:
        """Return why replay does not apply to these drafts; None where it does.

        It applies where a draft depends on nothing but the text and where the round began.
        """
        return (
            f"proposer: expected one whose drafts depend on the text alone, found {type(self).__name__}: decode with it"
        )

    def replay(
        self, task: DraftTask, texts: Sequence[WrittenText], distributions: Sequence[Tensor] | None
    ) -> BatchReplay:
        """Replay texts that the target wrote: see `draftsmith.decode.measurement.replay`.

        Args:
            task: for one row: sampler, vocabulary, the greatest draft length, the target.
            texts: what the target wrote.
            distributions: the target's, of each text's tokens, (N, V); None at T=0, where the text says what it chose.

        Raises:
            InputError: drafts that replay does not apply to.
        """
        raise InputError(str(self.replay_refusal(task.sampler.do_sample)))

    def distributions_after(self, target: PreTrainedModel, sampler: Sampler) -> Distributions | None:
        """Return a function that gives q after every context of texts; None where q is not a function of the text.

        The test of losslessness has more power with it. A wrong q costs power alone.
        """
        return None


class StatelessProposer(Proposer):
    """A proposer whose draft is a function of the text alone, for certain unless it overrides `replay`."""

    def replay_refusal(self, do_sample: bool) -> str | None:
        """Return None: replay asks it for a draft at every position of a text."""
        return None

    def replay(
        self, task: DraftTask, texts: Sequence[WrittenText], distributions: Sequence[Tensor] | None
    ) -> BatchReplay:
        """Replay certain drafts: a round accepts what they share with the text."""
        self.start(task)

        def drafts(text: WrittenText, draft_length: int) -> list[tuple[list[int], Tree]]:
            found = []
            for start in range(len(text)):
                context = text.sequence[: text.prompt_length + start]
                proposal = self.propose([context], [min(draft_length, max(0, text.limit - start - 1))])[0]
                if proposal.probabilities is not None:
                    raise InputError(f"replay: expected certain drafts, found {type(self).__name__}, which draws them")
                found.append((proposal.tokens.tolist(), proposal.tree))
            return found

        return replay_certain(texts, distributions, drafts)
