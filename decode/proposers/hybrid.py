"""Drafters that take turns: copies where the text repeats, and a model elsewhere."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import DraftTask, Outcome, Proposal, Proposer
from draftsmith.decode.proposers.copied import CopiedDraft, CopyProposer, Evidence
from draftsmith.decode.replay.batch_replay import BatchReplay, StartRounds, counts_of_rounds, overlap_by_start
from draftsmith.decode.replay.texts import AtTokens, WrittenText
from draftsmith.decode.rows import host_tokens


@dataclass(frozen=True)
class Switch:
    """A rule that takes a copied draft if its match and score are large enough: see `Evidence`."""

    match: int = 3  # the shortest match, in tokens
    score: float = 0.0  # the least score

    def __post_init__(self) -> None:
        for name, value in (("match", self.match), ("score", self.score)):
            if not value >= 0:
                raise InputError(f"switch: expected a {name} of at least 0, found {value}")

    def __call__(self, evidence: Evidence) -> bool:
        """Return whether a copied draft is taken."""
        return evidence.match >= max(1, self.match) and evidence.score >= self.score


class HybridProposer(Proposer):
    """A proposer that uses the first copied draft that the switch takes, or else the last drafter's.

    The switch sees only evidence from the text, so the choice is a function of the text: the output stays the target's,
    and replay is exact. The last drafter drafts nothing in a round of another; the tokens that its cache then lacks are
    fed when it drafts again.

    All drafters but the last are `CopyProposer`s, which know the evidence before they draft. `last_length` limits the
    drafts of the last drafter, which pays for each token while copies are free.

    Raises:
        InputError: fewer than two drafters, a first drafter that does not copy, or `last_length` below 1.
    """

    def __init__(
        self,
        drafters: Sequence[Proposer],
        switch: Callable[[Evidence], bool] = Switch(),
        last_length: int | None = None,
    ):
        if len(drafters) < 2:
            raise InputError(f"hybrid: expected two drafters or more, found {len(drafters)}")
        *first, self.last = drafters
        self.first: list[CopyProposer] = []
        for drafter in first:
            if not isinstance(drafter, CopyProposer):
                raise InputError(
                    f"hybrid: expected all drafters but the last to copy what they draft (SuffixProposer, "
                    f"PromptLookupProposer), found {type(drafter).__name__}"
                )
            self.first.append(drafter)
        if last_length is not None and last_length < 1:
            raise InputError(f"hybrid: expected a last draft of at least 1 token, found {last_length}")
        self.switch, self.last_length = switch, last_length
        self.wants_hidden, self.wants_features = self.last.wants_hidden, self.last.wants_features
        self._replays = _DrafterReplays()

    @property
    def drafters(self) -> list[Proposer]:
        """All drafters, in order of precedence."""
        return [*self.first, self.last]

    def lengths(self, draft_length: int) -> list[int]:
        """Return each drafter's own draft length, in order of precedence."""
        return [draft_length] * len(self.first) + [self._last_draft_length(draft_length)]

    def with_switch(self, switch: Callable[[Evidence], bool], last_length: int | None = None) -> Self:
        """Return the same drafters with another switch; both share the drafters' replays."""
        other = type(self)(self.drafters, switch, last_length)
        other._replays = self._replays
        return other

    def start(self, task: DraftTask) -> int:
        """Begin with all drafters, and return the greatest number of tokens of a draft."""
        copied = max(drafter.start(task) for drafter in self.first)
        # Programs draft to the depth of their task, so the last drafter's task has its own length.
        last_task = replace(
            task, draft_length=self._last_draft_length(task.draft_length), round_length=task.draft_length
        )
        return max(copied, self.last.start(last_task))

    def nodes(self, draft_length: int) -> int:
        """Return the number of tokens of the largest draft."""
        copied = max(drafter.nodes(draft_length) for drafter in self.first)
        return max(copied, self.last.nodes(self._last_draft_length(draft_length)))

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft for each row with the drafter that the switch takes."""
        copies = self._copies(contexts, draft_lengths)
        rows = zip(copies, draft_lengths, strict=True)
        last_lengths = [0 if copy else self._last_draft_length(k) for copy, k in rows]
        drafts = self.last.propose(contexts, last_lengths)
        last = len(self.first)
        if not any(copies):
            drafts[:] = [replace(draft, source=last) for draft in drafts]  # in place: `Drafts` keeps stacked tensors
            return drafts
        mixed = []
        for context, draft, copy in zip(contexts, drafts, copies, strict=True):
            if not copy:
                mixed.append(replace(draft, source=last))
            else:
                mixed.append(replace(copy[1].proposal(context), source=copy[0]))
        return mixed

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Pass the outcomes to all drafters."""
        for drafter in self.drafters:
            drafter.commit(outcomes)

    def select(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        for drafter in self.drafters:
            drafter.select(rows)

    def replay_refusal(self, do_sample: bool) -> str | None:
        """Refuse replays that the last drafter refuses."""
        return self.last.replay_refusal(do_sample)

    def replay(
        self, task: DraftTask, texts: Sequence[WrittenText], distributions: Sequence[AtTokens] | None
    ) -> BatchReplay:
        """Replay rounds that start with the drafter that the switch takes there."""
        self._replays.update(self, task, texts, distributions)
        replays, hybrids = self._replays.replays, self._replays.hybrids
        if replays[-1].rounds is None:
            raise InputError(
                f"replay: expected rounds of one shape from each start, found {type(self.last).__name__}'s: decode them"
            )
        sources = [self._sources(evidence) for evidence in self._replays.evidence]
        key = torch.cat(sources).numpy().tobytes(), self.last_length
        if key in hybrids:  # many switches choose alike
            return hybrids[key]

        @lru_cache
        def rounds(draft_length: int) -> list[StartRounds]:
            pairs = zip(replays, self.lengths(draft_length), strict=True)
            members = [replay.rounds(length) for replay, length in pairs if replay.rounds is not None]
            return [_select_rounds(source_N, [m[text] for m in members]) for text, source_N in enumerate(sources)]

        first_rounds = [replay.rounds(1) for replay in replays if replay.rounds is not None]
        overlaps = []
        for text, source_N in enumerate(sources):
            pairs = zip(replays, first_rounds, strict=True)
            by_start = torch.stack([overlap_by_start(replay.overlaps[text], first[text])[0] for replay, first in pairs])
            overlaps.append(by_start.gather(0, source_N[None])[0])
        acceptance = [start_rounds.acceptance[:, 0] for start_rounds in rounds(1)]
        hybrids[key] = BatchReplay(
            acceptance, overlaps, lambda k: counts_of_rounds(texts, rounds(k)), rounds=rounds, sources=sources
        )
        return hybrids[key]

    def _last_draft_length(self, draft_length: int) -> int:
        return draft_length if self.last_length is None else min(draft_length, self.last_length)

    def _copies(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[tuple[int, CopiedDraft] | None]:
        """Return for each row the first copied draft that the switch takes, with its drafter's index."""
        copies: list[tuple[int, CopiedDraft] | None] = []
        for row, (text, draft_length) in enumerate(zip(host_tokens(contexts), draft_lengths, strict=True)):
            # A generator: later drafters do not search once a draft is taken.
            candidates = ((i, drafter.find_row(row, text, draft_length)) for i, drafter in enumerate(self.first))
            copies.append(next((copy for copy in candidates if self.switch(copy[1].evidence)), None))
        return copies

    def _sources(self, evidence: Sequence[Sequence[Evidence]]) -> Tensor:
        """Return the index of the drafter that drafts at each start, (N,), given the copying drafters' evidence."""
        last = len(self.first)
        sources = [
            next((i for i, drafter_evidence in enumerate(start) if self.switch(drafter_evidence)), last)
            for start in zip(*evidence, strict=True)
        ]
        return torch.tensor(sources, dtype=torch.long)


class _DrafterReplays:
    """The last replays of the drafters, shared by hybrids that differ only in the switch."""

    def __init__(self) -> None:
        self._texts: object = None
        self.replays: list[BatchReplay] = []  # one replay for each drafter
        self.evidence: list[list[list[Evidence]]] = []  # the evidence at each start, by text and copying drafter
        self.hybrids: dict[tuple[bytes, int | None], BatchReplay] = {}
        """Replays of hybrids, by their sources at each start and `last_length`."""

    def update(
        self,
        hybrid: HybridProposer,
        task: DraftTask,
        texts: Sequence[WrittenText],
        distributions: Sequence[AtTokens] | None,
    ) -> None:
        """Replay the drafters, unless the last replays were of the same list of texts."""
        if self._texts is not texts:
            self.replays = [drafter.replay(task, texts, distributions) for drafter in hybrid.drafters]
            self.evidence = [
                [[copy.evidence for copy in drafter.drafts_by_start(text, 1)] for drafter in hybrid.first]
                for text in texts
            ]
            self._texts, self.hybrids = texts, {}


def _select_rounds(source_N: Tensor, members: Sequence[StartRounds]) -> StartRounds:
    depth = max(rounds.widths.shape[1] for rounds in members)

    def select(name: str) -> Tensor:
        tables = [getattr(rounds, name).double() for rounds in members]
        padded = [torch.nn.functional.pad(table, (0, depth - table.shape[1])) for table in tables]
        return torch.stack(padded)[source_N, torch.arange(len(source_N))]

    return StartRounds(select("acceptance"), select("widths").long())
