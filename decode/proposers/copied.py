"""Drafts copied from texts: what was found, and how good it seems, before any model is asked."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from draftsmith.decode.proposers.base import DraftTask, Proposal, Proposer
from draftsmith.decode.replay.batch_replay import BatchReplay, replay_certain
from draftsmith.decode.replay.texts import WrittenText
from draftsmith.decode.rows import host_tokens
from draftsmith.decode.tree import Tree


@dataclass(frozen=True)
class Evidence:
    """What a text says of a draft that was copied, before anything is drafted behind it."""

    match: int
    """The last tokens of the text that stood before too; 0 where nothing was found."""
    score: float
    """Tokens that may be accepted, by how often the text went on like this; `inf` where that is not counted."""
    length: int
    """T, tokens of the text."""


@dataclass(frozen=True)
class Found:
    """A draft that was copied, possibly an empty one."""

    tokens: Sequence[int]
    tree: Tree
    evidence: Evidence

    def proposal(self, like: Tensor) -> Proposal:
        """Return it as a draft, with tokens like a tensor's."""
        return Proposal(like.new_tensor(self.tokens), None, self.tree)

    def cut(self, depth: int) -> "Found":
        """Return it without what lies deeper."""
        if depth >= self.tree.depth:
            return self
        tree, nodes = self.tree.pruned(depth)
        return Found([self.tokens[node] for node in nodes], tree, self.evidence)


Finder = Callable[[np.ndarray, int], Found]
"""Of one text that grows: its tokens so far, (T,) int64, and the draft length → what is drafted behind them."""


class CopyProposer(Proposer):
    """Copies its drafts, for certain: they are functions of the text, or of it and earlier ones."""

    nested: ClassVar[bool] = False
    """Whether a shorter draft is what a longer one begins with: then one pass replays all draft lengths."""

    @abstractmethod
    def finder(self, max_length: int) -> Finder:
        """Return what finds drafts behind one text alone; `start` need not have been called.

        Each call must be of the text of the call before, or of one that begins with it.

        Args:
            max_length: tokens of the text at most.
        """

    def start(self, task: DraftTask) -> int:
        """Begin with new texts."""
        self._rows = [self.finder(task.max_length) for _ in task.generators]
        return self.nodes(task.draft_length)

    def select(self, rows: Sequence[int]) -> None:
        """Drop the other rows' texts."""
        self._rows = [self._rows[row] for row in rows]

    def find(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Found]:
        """Return what is drafted for each row, and the evidence for it, whatever the draft length.

        Args:
            contexts: as of `propose`.
            draft_lengths: as there.
        """
        rows = enumerate(zip(host_tokens(contexts), draft_lengths, strict=True))
        return [self.find_row(row, text, draft_length) for row, (text, draft_length) in rows]

    def find_row(self, row: int, text: np.ndarray, draft_length: int) -> Found:
        """Return `find` of one row; what was written since the row was last asked for is looked at now.

        Args:
            row: its place among the present ones.
            text: its tokens on the host, (T,) int64.
            draft_length: as of `find`.
        """
        return self._rows[row](text, draft_length)

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft for each row, possibly nothing."""
        return [found.proposal(contexts[0]) for found in self.find(contexts, draft_lengths)]

    def founds(self, text: WrittenText, draft_length: int) -> list[Found]:
        """Return what a round that starts at each token of a text drafts, N of them."""
        finder, tokens = self.finder(len(text.sequence)), text.sequence.cpu().numpy()
        return [
            finder(tokens[: text.prompt_length + start], min(draft_length, max(0, text.limit - start - 1)))
            for start in range(len(text))
        ]

    def replay_refusal(self, do_sample: bool) -> str | None:
        """Return None: replay asks it for a draft at every position of a text."""
        return None

    def replay(
        self, task: DraftTask, texts: Sequence[WrittenText], distributions: Sequence[Tensor] | None
    ) -> BatchReplay:
        """Replay certain drafts: a round accepts what they share with the text, at any temperature."""
        wholes: dict[int, list[Found]] = {}

        def drafts(text: WrittenText, draft_length: int) -> list[tuple[Sequence[int], Tree]]:
            if not self.nested:
                found = self.founds(text, draft_length)
            else:
                if id(text) not in wholes:
                    wholes[id(text)] = self.founds(text, task.draft_length)
                found = [whole.cut(draft_length) for whole in wholes[id(text)]]
            return [(draft.tokens, draft.tree) for draft in found]

        return replay_certain(texts, distributions, drafts)
