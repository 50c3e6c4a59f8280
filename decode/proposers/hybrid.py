"""Several drafters that take turns: copies where the text repeats, a model elsewhere."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import DraftTask, Outcome, Proposal, Proposer
from draftsmith.decode.proposers.copied import CopyProposer, Evidence, Found
from draftsmith.decode.replay.batch_replay import BatchReplay, StartRounds, counts_of_rounds
from draftsmith.decode.replay.texts import WrittenText
from draftsmith.decode.rows import host_tokens
from draftsmith.decode.tree import ROOT, Tree


@dataclass(frozen=True)
class Switch:
    """Takes a copied draft where it seems good enough.

    Raises:
        InputError: a level below 0.
    """

    match: int = 3
    """The shortest match, in tokens."""
    score: float = 0.0
    """The least score: see `Evidence`."""

    def __post_init__(self) -> None:
        for name, value in (("match", self.match), ("score", self.score)):
            if not value >= 0:
                raise InputError(f"switch: expected a {name} of at least 0, found {value}")

    def __call__(self, evidence: Evidence) -> bool:
        """Say whether a copied draft is taken."""
        return evidence.match >= max(1, self.match) and evidence.score >= self.score


class HybridProposer(Proposer):
    """Drafts with the first of its drafters that the switch takes, and where it takes none, with the last.

    The switch sees evidence of the text alone, before the last drafter is asked, and never what is drafted: so the
    choice is a function of the text, the output stays the target's, and replay is exact. The last drafter is asked for
    nothing in a round that another drafts; what its cache then lacks is fed together when it is asked again.

    Args:
        drafters: all but the last are `CopyProposer`s: what a model would draft is not known before it has drafted.
        switch: from evidence to whether the draft that it is of is taken.
        graft: draft both, the copied tokens as a branch of the last drafter's tree, where the switch takes them.
        last_length: the longest draft of the last drafter, which pays for each token where copies cost nothing; None
            for γ.

    Raises:
        InputError: fewer than two drafters, one that comes first and is no copy, or a last draft of no token.
    """

    def __init__(
        self,
        drafters: Sequence[Proposer],
        switch: Callable[[Evidence], bool] = Switch(),
        graft: bool = False,
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
        self.switch, self.graft, self.last_length = switch, graft, last_length
        self.wants_hidden, self.wants_features = self.last.wants_hidden, self.last.wants_features
        self._replayed = _Replayed()

    @property
    def drafters(self) -> list[Proposer]:
        """All of them, in the order in which they are looked at."""
        return [*self.first, self.last]

    def lengths(self, draft_length: int) -> list[int]:
        """Return how many tokens each drafter is asked for, in their order, where γ are wanted."""
        return [draft_length] * len(self.first) + [self._of_last(draft_length)]

    def with_switch(self, switch: Callable[[Evidence], bool], last_length: int | None = None) -> Self:
        """Return the same drafters with another switch; what one of them replays serves both."""
        other = type(self)(self.drafters, switch, self.graft, last_length)
        other._replayed = self._replayed
        return other

    def start(self, task: DraftTask) -> int:
        """Begin with all drafters. Return the greatest number of tokens of a draft."""
        self._vocab_size = task.vocab_size
        copied = max(drafter.start(task) for drafter in self.first)
        # Programs draft as deep as their task says: the last drafter's is its own length.
        own = replace(task, draft_length=self._of_last(task.draft_length), round_length=task.draft_length)
        of_last = self.last.start(own)
        return copied + of_last if self.graft else max(copied, of_last)

    def nodes(self, draft_length: int) -> int:
        """Return the tokens of the largest draft."""
        copied = max(drafter.nodes(draft_length) for drafter in self.first)
        of_last = self.last.nodes(self._of_last(draft_length))
        return copied + of_last if self.graft else max(copied, of_last)

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft for each row with the drafter that the switch takes."""
        taken = self._taken(contexts, draft_lengths)
        asked = [
            self._of_last(k) if self.graft or not found else 0 for found, k in zip(taken, draft_lengths, strict=True)
        ]
        drafts = self.last.propose(contexts, asked)
        source = len(self.first)
        if not any(taken):
            drafts[:] = [replace(draft, source=source) for draft in drafts]  # what they have together stays with them
            return drafts
        mixed = []
        for context, draft, found in zip(contexts, drafts, taken, strict=True):
            if not found:
                mixed.append(replace(draft, source=source))
            elif self.graft:
                mixed.append(replace(grafted(draft, found[1], self._vocab_size), source=source))
            else:
                mixed.append(replace(found[1].proposal(context), source=found[0]))
        return mixed

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Let all drafters learn what became of the drafts."""
        for drafter in self.drafters:
            drafter.commit(outcomes)

    def select(self, rows: Sequence[int]) -> None:
        """Drop the other rows."""
        for drafter in self.drafters:
            drafter.select(rows)

    def replay_refusal(self, do_sample: bool) -> str | None:
        """Refuse grafts, whose tokens are not known without the draft, and what the last drafter refuses."""
        if self.graft:
            return "replay: expected drafters that take turns, found copies as a branch of another's tree: decode them"
        return self.last.replay_refusal(do_sample)

    def replay(
        self, task: DraftTask, texts: Sequence[WrittenText], distributions: Sequence[Tensor] | None
    ) -> BatchReplay:
        """Replay rounds that start with the drafter that the switch takes there.

        Raises:
            InputError: a last drafter that cannot take turns with others.
        """
        replayed = self._replayed.of(self, task, texts, distributions)
        if replayed.all[-1].rounds is None:
            raise InputError(
                f"replay: expected rounds of one shape from each start, found {type(self.last).__name__}'s: decode them"
            )
        sources = [self._sources(of_text) for of_text in replayed.evidence]
        choice = torch.cat(sources).numpy().tobytes(), self.last_length
        if choice in replayed.chosen:  # many switches choose alike
            return replayed.chosen[choice]

        @lru_cache
        def rounds(draft_length: int) -> list[StartRounds]:
            each = zip(replayed.all, self.lengths(draft_length), strict=True)
            members = [replay.rounds(length) for replay, length in each if replay.rounds is not None]
            return [_of_sources(of, [rounds_of[text] for rounds_of in members]) for text, of in enumerate(sources)]

        first_rounds = [replay.rounds(1) for replay in replayed.all if replay.rounds is not None]
        overlaps = []
        for text, of in enumerate(sources):
            each = zip(replayed.all, first_rounds, strict=True)
            by_start = torch.stack([_by_start(replay.overlaps[text], rounds[text]) for replay, rounds in each])
            overlaps.append(by_start.gather(0, of[None])[0])
        acceptance = [each.acceptance[:, 0] for each in rounds(1)]
        replayed.chosen[choice] = BatchReplay(
            acceptance, overlaps, lambda k: counts_of_rounds(texts, rounds(k)), rounds=rounds, sources=sources
        )
        return replayed.chosen[choice]

    def _of_last(self, draft_length: int) -> int:
        return draft_length if self.last_length is None else min(draft_length, self.last_length)

    def _taken(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[tuple[int, Found] | None]:
        """Return for each row the first copied draft that the switch takes, and whose it is."""
        taken: list[tuple[int, Found] | None] = []
        for row, (text, draft_length) in enumerate(zip(host_tokens(contexts), draft_lengths, strict=True)):
            each = ((place, drafter.find_row(row, text, draft_length)) for place, drafter in enumerate(self.first))
            taken.append(next((its for its in each if self.switch(its[1].evidence)), None))
        return taken

    def _sources(self, evidence: Sequence[Sequence[Evidence]]) -> Tensor:
        """Return whose draft is taken at each start, (N,), by the evidence of each copying drafter there."""
        last = len(self.first)
        of_starts = [
            next((place for place, its in enumerate(of_start) if self.switch(its)), last)
            for of_start in zip(*evidence, strict=True)
        ]
        return torch.tensor(of_starts, dtype=torch.long)


class _Replayed:
    """What each drafter of hybrids replayed last: of many switches they replay alike."""

    def __init__(self) -> None:
        self._of: object = None
        self.all: list[BatchReplay] = []
        """In the order of the drafters."""
        self.evidence: list[list[list[Evidence]]] = []
        """Of each text, by copying drafter and start."""
        self.chosen: dict[tuple[bytes, int | None], BatchReplay] = {}
        """Of hybrids, by whose draft they take at each start, and the longest draft of the last drafter."""

    def of(
        self,
        hybrid: HybridProposer,
        task: DraftTask,
        texts: Sequence[WrittenText],
        distributions: Sequence[Tensor] | None,
    ) -> "_Replayed":
        """Replay the drafters, unless they were on these very texts."""
        if self._of is not texts:
            self.all = [drafter.replay(task, texts, distributions) for drafter in hybrid.drafters]
            self.evidence = [
                [[found.evidence for found in drafter.founds(text, 1)] for drafter in hybrid.first] for text in texts
            ]
            self._of, self.chosen = texts, {}
        return self


def _of_sources(sources: Tensor, members: Sequence[StartRounds]) -> StartRounds:
    """Return the rounds of the drafter that has each start, (N,)."""
    depth = max(each.widths.shape[1] for each in members)

    def chosen(name: str) -> Tensor:
        padded = [
            torch.nn.functional.pad(values := getattr(each, name), (0, depth - values.shape[1])) for each in members
        ]
        return torch.stack([values.double() for values in padded])[sources, torch.arange(len(sources))]

    return StartRounds(chosen("acceptance"), chosen("widths").long())


def _by_start(overlap: Tensor, rounds: StartRounds) -> Tensor:
    """Return the overlap at each start, (N,): some drafters give it where they draft alone."""
    drafts = rounds.widths[:, 0] > 0
    if len(overlap) == len(drafts):
        return overlap.double()
    return torch.zeros(len(drafts), dtype=torch.double).masked_scatter_(drafts, overlap.double())


def grafted(draft: Proposal, copied: Found, vocab_size: int) -> Proposal:
    """Return a draft with a copied chain or tree as a further branch: what both begin with is there once.

    A copied token stands behind its siblings and was drawn from itself alone. It is left out where a sibling is the
    same token, and what follows it follows that one: whether it is drafted depends on what was drawn before it, which
    the rule allows, never on itself.

    Args:
        draft: what was drafted, possibly nothing.
        copied: what was copied.
        vocab_size: V.
    """
    tokens, parents, nodes = draft.tokens.tolist(), list(draft.tree.parents), {ROOT: ROOT}
    named: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        named.setdefault((parent, token), node)
    for node, (token, parent) in enumerate(zip(copied.tokens, copied.tree.parents, strict=True)):
        above = nodes[parent]
        if (above, token) not in named:
            named[above, token] = len(tokens)
            tokens.append(token)
            parents.append(above)
        nodes[node] = named[above, token]
    q, confidence, count = draft.dense(vocab_size).probabilities, draft.confidence, len(tokens) - len(draft.tokens)
    added = draft.tokens.new_tensor(tokens[len(draft.tokens) :])
    if q is not None:
        q = torch.cat([q, q.new_zeros(count, vocab_size).scatter_(1, added[:, None], 1.0)])
    if confidence is not None:
        confidence = torch.cat([confidence, confidence.new_ones(count)])
    return Proposal(torch.cat([draft.tokens, added]), q, Tree(tuple(parents)), confidence)
