"""The base class of proposers, and the drafts and outcomes that they exchange with the round loop."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache import pad_right
from draftsmith.decode.errors import InputError
from draftsmith.decode.replay.batch_replay import BatchReplay, replay_deterministic
from draftsmith.decode.replay.texts import AtTokens, Distributions, WrittenText
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import Tree


@dataclass(frozen=True)
class SiblingDraws:
    """The distributions that the siblings of one row's tree were drawn from, without replacement.

    Shape suffixes: F distributions, M tokens of each, K nodes.
    """

    support: Tensor  # the distinct tokens of each distribution, (F, M) int64
    q: Tensor  # their probabilities, (F, M), which sum to 1
    distribution: tuple[int, ...]
    """The index of the distribution from which the children of the root and of each node were drawn, (K + 1,)."""
    indices: Tensor  # the index of each node's token in the support of its parent's distribution, (K,)

    def to(self, device: torch.device) -> "SiblingDraws":
        """Return a copy on a device."""
        return SiblingDraws(self.support.to(device), self.q.to(device), self.distribution, self.indices.to(device))

    def dense(self, tree: Tree, vocab_size: int) -> Tensor:
        """Return each node's distribution over the whole vocabulary, (K, V): see `Proposal.probabilities`."""
        rows = self.q.new_zeros(len(tree), vocab_size)
        for parent, siblings in enumerate(tree.children):
            i = self.distribution[parent]
            q_M = self.q[i].clone()
            # Without replacement: a later sibling's q excludes the earlier ones and is renormalised.
            for node in siblings:
                rows[node, self.support[i]] = q_M / q_M.sum().clamp(min=torch.finfo(q_M.dtype).tiny)
                q_M[self.indices[node]] = 0.0
        return rows


@dataclass(frozen=True)
class Proposal:
    """One row's draft, a chain or a tree, and the distributions that it was drawn from."""

    tokens: Tensor  # drafted tokens, (K,) int64, K ≥ 0: a proposer may draft fewer than the draft length
    probabilities: Tensor | None
    """Each token's distribution, (K, V) with the target's V. A later sibling's is renormalised without the earlier
    siblings' tokens, and all zero where no token is left. None if `siblings` is set, or if the draft is deterministic,
    as at T=0; siblings are then distinct."""
    tree: Tree
    confidence: Tensor | None = None
    """Max q in each token's context, or the drafter's own estimate of the token's acceptance there, (K,)."""
    siblings: SiblingDraws | None = None  # the distributions of a tree's siblings, in place of `probabilities`
    source: int = 0  # the index of the drafter that drafted it, where several take turns

    def dense(self, vocab_size: int) -> "Proposal":
        """Return the draft with `probabilities` in place of `siblings`."""
        if self.siblings is None:
            return self
        return replace(self, probabilities=self.siblings.dense(self.tree, vocab_size), siblings=None)

    def to(self, device: torch.device) -> "Proposal":
        """Return a copy on a device."""
        parts = {name: getattr(self, name) for name in ("tokens", "probabilities", "confidence", "siblings")}
        return replace(self, **{name: part.to(device) for name, part in parts.items() if part is not None})

    def pruned(self, depth: int) -> "Proposal":
        """Return the draft without the nodes deeper than `depth`."""
        tree, nodes = self.tree.pruned(depth)
        if tree is self.tree:
            return self
        siblings = self.siblings
        if siblings is not None:  # entry 0 is the root's, entry n + 1 is node n's
            indices = tuple(siblings.distribution[index] for index in (0, *(node + 1 for node in nodes)))
            siblings = SiblingDraws(siblings.support, siblings.q, indices, siblings.indices[nodes])
        q, confidence = (None if rows is None else rows[nodes] for rows in (self.probabilities, self.confidence))
        return Proposal(self.tokens[nodes], q, tree, confidence, siblings, self.source)


class Drafts(list[Proposal]):
    """The drafts of a batch, together with their stacked tensors.

    `tokens` is (B, K) and `probabilities` (B, K, V); entries beyond a shorter draft are undefined. `block`, if known,
    is each text's last token followed by `tokens`, (B, 1 + K).
    """

    def __init__(
        self, proposals: Sequence[Proposal], tokens: Tensor, probabilities: Tensor | None, block: Tensor | None = None
    ):
        super().__init__(proposals)
        self.tokens, self.probabilities, self.block = tokens, probabilities, block

    @classmethod
    def chains(
        cls,
        lengths: Sequence[int],
        tokens_BK: Tensor,
        q_BKV: Tensor | None,
        confidence_BK: Tensor | None,
        block: Tensor | None = None,
    ) -> "Drafts":
        """Return chains of the given lengths, at most K each; q is None if they are deterministic."""
        longest = max(lengths)
        q_BKV = None if q_BKV is None else q_BKV[:, :longest]
        proposals = [
            Proposal(
                tokens_BK[row, :k],
                q_BKV[row, :k] if k and q_BKV is not None else None,
                Tree.chain(k),
                None if confidence_BK is None else confidence_BK[row, :k],
            )
            for row, k in enumerate(lengths)
        ]
        return cls(proposals, tokens_BK[:, :longest], q_BKV, None if block is None else block[:, : 1 + longest])


def last_tokens(texts: Sequence[Tensor], count: int) -> Tensor:
    """Return the last tokens of B texts of (T_b,), (B, count)."""
    ends = [text[-count:] for text in texts]
    return torch.stack(ends) if len(ends) > 1 else ends[0][None]


def stack_tokens(proposals: Sequence[Proposal], width: int) -> Tensor:
    """Return the drafted tokens of a batch, (B, width); entries beyond a shorter draft are undefined."""
    if isinstance(proposals, Drafts) and proposals.tokens.shape[1] == width:
        return proposals.tokens
    return pad_right([proposal.tokens for proposal in proposals], width)


def stack_probabilities(proposals: Sequence[Proposal], width: int) -> Tensor | None:
    """Return the distributions of a batch of chains, (B, width, V); None if all drafts are deterministic.

    In a mixed batch, the distributions of a deterministic draft are one-hot.
    """
    if isinstance(proposals, Drafts) and (proposals.probabilities is None or proposals.probabilities.shape[1] == width):
        return proposals.probabilities
    known = [proposal.probabilities for proposal in proposals if proposal.probabilities is not None]
    if not known:
        return None
    q_BKV = known[0].new_zeros(len(proposals), width, known[0].shape[1])
    for row, proposal in zip(q_BKV, proposals, strict=True):
        if proposal.probabilities is None:
            row[: len(proposal.tokens)].scatter_(1, proposal.tokens[:, None], 1.0)
        else:
            row[: len(proposal.tokens)] = proposal.probabilities
    return q_BKV


@dataclass(frozen=True)
class DraftTask:
    """The rows and settings of one call of the decoder."""

    sampler: Sampler
    """The warping of the target's logits, which the drafter applies to its own; the first row's where rows differ."""
    vocab_size: int  # V, the width of the target's logits
    generators: Sequence[torch.Generator | None]  # each row's random generator; None is torch's global one
    max_length: int  # the greatest length of a row, in tokens, prompt included
    draft_length: int  # γ, the greatest depth of a draft
    draw_siblings: bool  # whether siblings of a tree may be drawn under sampling; a lossy rule wants them deterministic
    compiled: bool
    target: PreTrainedModel | None = None  # the target, for drafters that use its weights
    round_length: int = 0
    """The greatest γ of drafters that take turns with this one: its cache may lack that many tokens."""
    row_samplers: Sequence[Sampler] = ()
    """Each row's warping; set only where rows differ, because a processor depends on the prompt's length or the row."""

    @property
    def samplers(self) -> Sequence[Sampler]:
        """Each row's warping."""
        return self.row_samplers or [self.sampler] * len(self.generators)


@dataclass(frozen=True)
class Outcome:
    """The result of one row's draft."""

    path: list[int]  # the accepted nodes, from the root's child down; one more token of the target follows them
    logits: Tensor  # the target's logits at the root and then at the nodes, (K + 1, V)
    hidden: Tensor | None = None
    """The hidden states that gave those logits, (K + 1, H), for a proposer that `wants_hidden`."""
    features: Tensor | None = None
    """The target's features at the root and the accepted nodes, (1 + len(path), F), if it `wants_features`."""
    prompt_features: Tensor | None = None
    """The features of the tokens before the root, (T − 1, F), in a text's first round. Large: do not keep them."""


class Proposer(ABC):
    """The base class of drafters.

    The loop calls `start` once, then alternates `propose` and `commit`, and calls `select` when rows end. Three rules
    keep the decoder lossless:

    * `probabilities` are the distributions that the tokens were drawn from;
    * whether a node is drafted may depend on the tokens drafted before it, but never on its own token;
    * all random numbers come from the task's generators.
    """

    wants_hidden: bool = False  # whether outcomes hold the target's hidden states
    wants_features: Sequence[int] = ()
    """Ascending depths in the target's layers, whose features outcomes hold concatenated: F = H × their number. A
    proposer wants these or hidden states, not both."""
    at_once: bool = False  # whether a draft costs about the same at any length
    positions: int | None = None  # the longest text that it drafts for, in tokens; None for no limit
    longest: int | None = None  # the greatest depth of its drafts at any draft length; None for no limit

    def start(self, task: DraftTask) -> int:
        """Begin with new rows, and return the greatest number of tokens of a draft."""
        self.task = task
        return task.draft_length

    @abstractmethod
    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft a continuation of each row's text.

        Args:
            contexts: the texts, B of (T_b,) int64; `decode.rows.host_tokens` gives their tokens on the host.
            draft_lengths: the greatest depth of each row's draft, possibly 0.
        """

    def nodes(self, draft_length: int) -> int:
        """Return the greatest number of tokens of a draft of this depth."""
        return draft_length

    def commit(self, outcomes: Sequence[Outcome]) -> None:  # noqa: B027
        """Take note of the outcome of each row's draft."""

    def select(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Drop all other rows."""

    def replay_refusal(self, do_sample: bool) -> str | None:
        """Return why replay does not apply to these drafts; None where it does.

        Replay applies where a draft depends only on the text and on where the round began.
        """
        return (
            f"proposer: expected one whose drafts depend on the text alone, found {type(self).__name__}: decode with it"
        )

    def replay(
        self, task: DraftTask, texts: Sequence[WrittenText], distributions: Sequence[AtTokens] | None
    ) -> BatchReplay:
        """Replay texts that the target wrote: see `draftsmith.decode.measurement.replay`.

        `task` is that of one row. `distributions` are the target's at each text's tokens; None at T=0.

        Raises:
            InputError: drafts that replay does not apply to.
        """
        raise InputError(str(self.replay_refusal(task.sampler.do_sample)))

    def distributions_after(self, target: PreTrainedModel, sampler: Sampler) -> Distributions | None:
        """Return a function that gives q after every context of texts; None if q is not a function of the text.

        It gives the test of losslessness more power. A wrong q costs only power.
        """
        return None


class StatelessProposer(Proposer):
    """A proposer whose draft is a function of the text alone, and deterministic unless it overrides `replay`."""

    def replay_refusal(self, do_sample: bool) -> str | None:
        """Return None: replay applies."""
        return None

    def replay(
        self, task: DraftTask, texts: Sequence[WrittenText], distributions: Sequence[AtTokens] | None
    ) -> BatchReplay:
        """Draft from every position of the texts; a round accepts the beginning that a draft shares with the text."""
        self.start(task)

        def drafts(text: WrittenText, draft_length: int) -> list[tuple[list[int], Tree]]:
            rounds = []
            for start in range(len(text)):
                # The last token of a text is always the target's: no draft reaches the limit.
                context = text.sequence[: text.prompt_length + start]
                proposal = self.propose([context], [min(draft_length, max(0, text.limit - start - 1))])[0]
                if proposal.probabilities is not None:
                    raise InputError(f"replay: expected certain drafts, found {type(self).__name__}, which draws them")
                rounds.append((proposal.tokens.tolist(), proposal.tree))
            return rounds

        return replay_deterministic(texts, distributions, task.vocab_size, drafts)
