"""The base of proposers that draft from the features of a target.

The target's features of accepted tokens are kept until the drafter's next draft, which fuses them and feeds its cache,
over what it drafted there before. In a text of T tokens the target has not seen the last one, so T − 1 positions
have features.

Shape suffixes: B rows, L positions, F features, H hidden.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache import Slots, pad_right
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import DraftTask, Outcome, Proposal
from draftsmith.decode.proposers.draft_model import DraftModelProposer
from draftsmith.decode.proposers.draft_tree import TreeProposer
from draftsmith.decode.proposers.feeder import Feeder, ProgramBlock
from draftsmith.decode.replay.batch_replay import BatchReplay, replay_by_start, replay_by_start_ranks
from draftsmith.decode.replay.ranks import MOST_RANKS, TextRanks
from draftsmith.decode.replay.starts import LogitsOfRounds, acceptance_by_start, ranks_by_start
from draftsmith.decode.replay.texts import AtTokens, WrittenText, fit_positions
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import Tree


class FeatureProposer(TreeProposer, DraftModelProposer):
    """A proposer of chains or trees from heads that see the target's features.

    The first round of a text has no features to draft from: it drafts nothing, and emits the token that the prompt's
    forward gives. `model` is the heads in the form of a causal LM, for `CachedModel`; its `draft_for` takes a target.
    """

    feeder: "StateFeeder"

    def __init__(self, heads: Any, model: Any, tree: Tree | None = None, greedy: bool = False):
        self.heads, self.tree, self.greedy = heads.eval(), tree, greedy
        self.draft_model: PreTrainedModel = model.eval()
        self.wants_features = heads.layer_ids
        self.positions = heads.config.max_position_embeddings + 1  # a text's last token is not fed

    def with_tree(self, tree: Tree) -> Self:
        """Return the same heads with another tree."""
        return type(self)(self.heads, tree)  # type: ignore[call-arg]

    @abstractmethod
    def logits_of(self, target: PreTrainedModel, text: WrittenText, depth: int) -> LogitsOfRounds:
        """Return the heads' logits by start and guess of a round of K = `depth` tokens, from one target forward."""

    def ranks(
        self, target: PreTrainedModel, sequence: Tensor, prompt_length: int, hidden_NH: Tensor | None = None
    ) -> TextRanks:
        """Return the ranks of a text's tokens among the heads' logits."""
        text = WrittenText(sequence, prompt_length, len(sequence) - prompt_length)
        _, (text,) = fit_positions([text], self.positions)
        return self._ranks(target, text, Sampler.of(0), [MOST_RANKS] * self.depth)

    def start(self, task: DraftTask) -> int:
        """Begin with an empty cache and no features, or raise an InputError if the target does not fit."""
        if task.target is None:
            raise InputError(f"{self.heads.field}: expected the target that the heads were trained on, found none")
        model: Any = self.draft_model
        model.draft_for(task.target)
        vocabulary, widest = self.heads.config.draft_vocab_size, self._widest(task.draft_length)
        if widest > vocabulary:
            raise InputError(
                f"tree: expected at most {vocabulary} siblings, as many as the heads have tokens, found {widest}"
            )
        self._home = self.heads.device, self.heads.dtype  # read once a text: each is a walk over the parameters
        return super().start(task)

    def most_fed(self, task: DraftTask) -> int:
        """Return the most positions that are fed at once: a draft's, or those that a round gives features to."""
        return max(super().most_fed(task), most_positions(task))

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft for each row; nothing in a text's first round, when the target has not run on the prompt yet."""
        if not self.feeder.parts or max(draft_lengths) < 1:
            return [Proposal(contexts[0].new_zeros(0), None, Tree.chain(0))] * len(contexts)
        with torch.inference_mode():
            return super().propose(contexts, draft_lengths)

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the features of accepted tokens; the next draft feeds them over what was drafted."""
        parts = self.feeder.parts = self.feeder.parts or [[] for _ in outcomes]
        for row, outcome in zip(parts, outcomes, strict=True):
            assert outcome.features is not None
            # The first round also brings the prompt's features.
            new = [outcome.features] if outcome.prompt_features is None else [outcome.prompt_features, outcome.features]
            row += [part.to(*self._home) for part in new if len(part)]

    def replay_refusal(self, do_sample: bool) -> str | None:
        """Refuse trees under sampling: the draws of their siblings are not known."""
        return super().replay_refusal(do_sample and not (self.tree is not None and self.tree.is_chain))

    def replay(
        self, task: DraftTask, texts: Sequence[WrittenText], distributions: Sequence[AtTokens] | None
    ) -> BatchReplay:
        """Replay chains, and at T=0 trees of one shape; drafts are cut to the longest that the heads know."""
        target, depth, sampler = task.target, min(task.draft_length, self.longest or task.draft_length), task.sampler
        assert target is not None
        self.heads.check_fits(target)
        _, texts = fit_positions(texts, self.positions)
        tree = self.shape(depth)
        if distributions is not None:
            acceptances = [
                self._acceptance(target, text, sampler, p, tree.depth)
                for text, p in zip(texts, distributions, strict=True)
            ]
            overlaps = [common_NK[:, 0][drafted_NK[:, 0]] for _, common_NK, drafted_NK in acceptances]
            return replay_by_start(texts, [a_NK for a_NK, _, _ in acceptances], overlaps, first=1)
        # Deeper than the tree only the most likely token counts, for servers that draft chains.
        widths, chains = [*tree.widths, *[1] * (depth - tree.depth)], self.tree is None
        ranks = [self._ranks(target, text, sampler, widths, chains) for text in texts]
        return replay_by_start_ranks(ranks, tree, [r.agreement for r in ranks])

    @torch.inference_mode()
    def _ranks(
        self, target: PreTrainedModel, text: WrittenText, sampler: Sampler, most: Sequence[int], by_argmax: bool = False
    ) -> TextRanks:
        logits = self.logits_of(target, text, len(most))
        return ranks_by_start(text, sampler, most, self.heads.config.vocab_size, logits, by_argmax)

    @torch.inference_mode()
    def _acceptance(
        self, target: PreTrainedModel, text: WrittenText, sampler: Sampler, p: AtTokens, depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a, Σ_v min(p, q) and whether a token is drafted: see `acceptance_by_start`."""
        logits, vocab_size = self.logits_of(target, text, depth), self.heads.config.vocab_size
        return acceptance_by_start(text, sampler, depth, logits, p, vocab_size, self.greedy)

    def _widest(self, draft_length: int) -> int:
        """Return the largest number of siblings in a draft."""
        depth = min(draft_length, self.longest or draft_length)
        return 1 if self.tree is None else max(map(len, self.tree.pruned(depth)[0].children))


class StateFeeder(Feeder):
    """Keeps a model fed with positions of the texts: position i has token i + 1, and the target's state of token i.

    `width` is the most positions that are fed at once after the first texts, since no further slots are free after the
    longest one. Rows that lack fewer positions are padded; the padding's slots are overwritten later.
    """

    def __init__(self, model: PreTrainedModel, task: DraftTask, block: int, width: int):
        super().__init__(model, task, task.max_length, block)
        self.width = width
        self.parts: list[list[Tensor]] = []  # for each row, those of `unfed` in order: a round that feeds none adds one

    @property
    def unfed(self) -> list[Tensor]:
        """For each row, (L, F): the features of its positions that are not fed yet."""
        self.parts = [parts if len(parts) == 1 else [torch.cat(parts)] for parts in self.parts]
        return [features_LF for (features_LF,) in self.parts]

    @unfed.setter
    def unfed(self, features: Sequence[Tensor]) -> None:
        self.parts = [[features_LF] for features_LF in features]

    def set_lengths(self, texts: Sequence[Tensor]) -> None:
        """Take note of the texts' lengths: the target has not seen their last tokens."""
        self.lengths = Slots([len(text) - 1 for text in texts], self.device)

    def block_from(
        self, texts: Sequence[Tensor], first: int, width: int, but: int = 0
    ) -> tuple[Tensor, Slots, dict[str, Tensor]]:
        """Return unfed positions of each row from index `first` on, except its last `but`, as arguments of a forward.

        These are tokens, (B, width), slots, and features, (B, width, F).
        """
        counts = [len(features_LF) for features_LF in self.unfed]
        at = [min(first, count - but) for count in counts]  # a finished row continues after its text
        tokens = [t[len(t) - n + i : len(t) - but][:width] for t, n, i in zip(texts, counts, at, strict=True)]
        features = [f[i : len(f) - but][:width] for f, i in zip(self.unfed, at, strict=True)]
        slots = [end - count + i for end, count, i in zip(self.lengths.host, counts, at, strict=True)]
        return pad_right(tokens, width), Slots(slots, self.device), {"features": pad_rows(features, width)}

    def take_block(self, texts: Sequence[Tensor]) -> tuple[Tensor, Slots, dict[str, Tensor]]:
        """Return all unfed positions as one block, to be fed by the caller."""
        block = self.block_from(texts, 0, max(map(len, self.unfed)))
        self.unfed = [features_LF[:0] for features_LF in self.unfed]
        return block

    def feed_unfed(self, texts: Sequence[Tensor], but: int = 0) -> None:
        """Feed the unfed positions of each row except its last `but`; the first texts in one forward."""
        most = max(map(len, self.unfed)) - but
        if self.model.is_empty and most:
            tokens, _, further = self.block_from(texts, 0, most, but)
            self.model.prefill(tokens, further=further)
        else:
            for first in range(0, most, self.width):
                tokens, slots, further = self.block_from(texts, first, min(self.width, most - first), but)
                self.model.feed(tokens, slots, 1, further=further)
        self.unfed = [features_LF[len(features_LF) - but :] for features_LF in self.unfed]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only some rows."""
        super().select(rows)
        self.parts = [self.parts[row] for row in rows]


class StepFeeder(StateFeeder):
    """Keeps heads of one layer fed with the target's states, and with their own for drafted tokens; see `read`."""

    def feed_texts(self, texts: Sequence[Tensor], masks: Tensor | None = None) -> Tensor:
        """Feed the positions that have features now; return the logits after each text, (B, 1, V).

        Rounds without drafts leave several blocks of `width` positions.
        """
        if self.model.is_empty:
            self.feed_unfed(texts, but=1)
        counts = [len(features_LF) for features_LF in self.unfed]
        width = min(max(counts), self.width)
        last_BH: Tensor | None = None
        for first in range(0, max(counts), width):
            tokens, slots, further = self.block_from(texts, first, width)
            outputs = self.model.feed(tokens, slots, further=further)
            ends = [count - 1 - first for count in counts]
            if len(set(ends)) == 1 and 0 <= ends[0] < width:
                last_BH = outputs[:, ends[0]]
                continue
            # Each row's last position is in one of the blocks: take it from there.
            at = torch.tensor(ends, device=outputs.device)
            here = outputs.take_along_dim(at.clamp(0, width - 1)[:, None, None], dim=1)[:, 0]
            inside = (at >= 0) & (at < width)
            last_BH = here if last_BH is None else here.where(inside[:, None], last_BH)
        assert last_BH is not None
        self.unfed = [features_LF[:0] for features_LF in self.unfed]
        logits, self.states = self.read(last_BH[:, None])
        return logits

    def program_block(self, texts: Sequence[Tensor]) -> ProgramBlock | None:
        """Return the positions that have features now, if they fit in one block; rows end in different columns."""
        if self.model.is_empty:
            self.feed_unfed(texts, but=1)
        elif max(map(len, self.unfed)) > self.width:
            return None
        ends = torch.tensor([len(features_LF) for features_LF in self.unfed], device=self.device) - 1
        tokens, slots, further = self.take_block(texts)
        return ProgramBlock(tokens, slots, torch.arange(tokens.shape[1], device=self.device), ends, ends, further)


def most_positions(task: DraftTask) -> int:
    """Return the most positions of a text that a round gives features to."""
    return max(task.draft_length, task.round_length) + 1


def pad_rows(rows: Sequence[Tensor], width: int) -> Tensor:
    """Return rows of at most `width` features as one tensor, (B, width, F), padded with zeros at the end."""
    return torch.stack([nn.functional.pad(features, (0, 0, 0, width - len(features))) for features in rows])
