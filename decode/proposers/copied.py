"""Drafts copied from texts, with evidence of their quality that is known before any model runs."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from draftsmith.decode.proposers.base import DraftTask, Proposal, Proposer
from draftsmith.decode.replay.batch_replay import BatchReplay, replay_deterministic
from draftsmith.decode.replay.texts import AtTokens, WrittenText
from draftsmith.decode.rows import host_tokens
from draftsmith.decode.tree import Tree


@dataclass(frozen=True)
class Evidence:
    """A text's evidence for a copied draft, known before the draft is verified."""

    match: int  # the number of last tokens that occurred earlier; 0 without a match
    score: float
    """The expected number of accepted tokens, from frequencies of continuations; `inf` where none are counted."""
    length: int  # T, the length of the text in tokens


@dataclass(frozen=True)
class CopiedDraft:
    """A copied chain, possibly empty."""

    tokens: Sequence[int]
    evidence: Evidence

    def proposal(self, like: Tensor) -> Proposal:
        """Return it as a proposal, with the dtype and device of `like`."""
        return Proposal(like.new_tensor(self.tokens), None, Tree.chain(len(self.tokens)))


Finder = Callable[[np.ndarray, int], CopiedDraft]
"""(the tokens of one growing text so far (T,) int64, draft length) → the draft that follows them."""


class CopyProposer(Proposer):
    """A proposer of deterministic copies: functions of the text, or of it and earlier texts."""

    nested: ClassVar[bool] = False
    """Whether a shorter draft is a prefix of a longer one; one pass then replays all draft lengths."""

    @abstractmethod
    def finder(self, max_length: int) -> Finder:
        """Return a function that drafts for one text of at most `max_length` tokens, independently of `start`.

        Each call must pass the text of the previous call, possibly with tokens appended.
        """

    def start(self, task: DraftTask) -> int:
        """Begin with new texts."""
        self._rows = [self.finder(task.max_length) for _ in task.generators]
        return self.nodes(task.draft_length)

    def select(self, rows: Sequence[int]) -> None:
        """Drop all other rows' texts."""
        self._rows = [self._rows[row] for row in rows]

    def find(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[CopiedDraft]:
        """Return a copied draft for each row; its evidence does not depend on the draft length."""
        rows = enumerate(zip(host_tokens(contexts), draft_lengths, strict=True))
        return [self.find_row(row, text, draft_length) for row, (text, draft_length) in rows]

    def find_row(self, row: int, text: np.ndarray, draft_length: int) -> CopiedDraft:
        """Return `find` for one of the present rows, given its tokens on the host, (T,) int64."""
        return self._rows[row](text, draft_length)

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Return a copied draft for each row, possibly empty."""
        return [copied.proposal(contexts[0]) for copied in self.find(contexts, draft_lengths)]

    def drafts_by_start(self, text: WrittenText, draft_length: int) -> list[CopiedDraft]:
        """Return the drafts of rounds that start at each of a text's N tokens."""
        finder, tokens = self.finder(len(text.sequence)), text.sequence.cpu().numpy()
        # The last token before the limit is the target's own, so it is never drafted.
        return [
            finder(tokens[: text.prompt_length + start], min(draft_length, max(0, text.limit - start - 1)))
            for start in range(len(text))
        ]

    def replay_refusal(self, do_sample: bool) -> str | None:
        """Return None: replay applies."""
        return None

    def replay(
        self, task: DraftTask, texts: Sequence[WrittenText], distributions: Sequence[AtTokens] | None
    ) -> BatchReplay:
        """Draft from every position of the texts; a round accepts the beginning that a draft shares with the text."""
        longest: dict[int, list[CopiedDraft]] = {}

        def drafts(text: WrittenText, draft_length: int) -> list[tuple[Sequence[int], Tree]]:
            if not self.nested:
                copies = self.drafts_by_start(text, draft_length)
            else:  # search once at the greatest length and cut
                if id(text) not in longest:
                    longest[id(text)] = self.drafts_by_start(text, task.draft_length)
                copies = longest[id(text)]
            chains = [copied.tokens[:draft_length] for copied in copies]
            return [(tokens, Tree.chain(len(tokens))) for tokens in chains]

        return replay_deterministic(texts, distributions, task.vocab_size, drafts)
