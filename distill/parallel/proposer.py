"""A draft model that drafts all tokens of a round in one forward (PARD, An et al. 2025, arXiv 2504.18583).

Shape suffixes: B rows, K drafted tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.proposers.base import DraftTask, Outcome, Proposal
from draftsmith.decode.proposers.draft_model import DraftModelProposer
from draftsmith.decode.proposers.draft_tree import TreeProposer, draft_static_tree
from draftsmith.decode.replay.batch_replay import BatchReplay, replay_by_start, replay_by_start_ranks
from draftsmith.decode.replay.ranks import MOST_RANKS, TextRanks
from draftsmith.decode.replay.texts import AtTokens, WrittenText, fit_positions, pad_tokens
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import Tree
from draftsmith.distill.parallel.layout import check_depth, length_of, mask_token_of
from draftsmith.distill.parallel.replay import text_acceptance, text_ranks


class ParallelDraftProposer(TreeProposer, DraftModelProposer):
    """A proposer of K tokens in one forward of a parallel draft: see `draftsmith.distill.parallel.layout`.

    A forward feeds the uncached tokens of the text and K − 1 masks. Drafted tokens are not fed in their own round: the
    cache holds masks for them, whose slots the accepted tokens overwrite in the next round.

    Each token is drawn from its own q_j, which depends on the text but not on the tokens drafted before it. Processors
    do see the drafted tokens; the returned q_j includes their effect.

    `tree` and `greedy` are as in `DraftModelProposer`. All nodes of one depth have one distribution of children.

    Raises:
        InputError: a config without a mask token, or a tree deeper than the trained length.
    """

    at_once = True

    def __init__(self, draft_model: PreTrainedModel, tree: Tree | None = None, greedy: bool = False):
        super().__init__(draft_model, tree, greedy=greedy)
        self._mask = mask_token_of(draft_model)
        self.longest = length_of(draft_model.config)
        if tree is not None:
            check_depth(tree, draft_model.config)

    def with_tree(self, tree: Tree) -> Self:
        """Return the same draft with another tree."""
        return type(self)(self.draft_model, tree)

    def ranks(
        self, target: PreTrainedModel, sequence: Tensor, prompt_length: int, hidden_NH: Tensor | None = None
    ) -> TextRanks:
        """Return the ranks of a text's tokens among the draft's logits."""
        text = WrittenText(sequence, prompt_length, len(sequence) - prompt_length)
        vocab_size = target.config.get_text_config().vocab_size
        ((drafted,), _) = fit_positions([text], self.positions)
        ranks, _ = text_ranks(self.draft_model, drafted, Sampler.of(0), vocab_size, [MOST_RANKS] * self.depth)
        return ranks.up_to(len(text))

    def most_fed(self, task: DraftTask) -> int:
        """Return the most tokens and masks that are fed at once."""
        depth = self._cut(task.draft_length)
        uncached = 1 << depth.bit_length()  # K + 1 tokens, rounded up to a power of two for fixed shapes
        return uncached + depth - 1

    def nodes(self, draft_length: int) -> int:
        """Return the number of nodes of the tree down to this depth, or the length of a chain."""
        return super().nodes(self._cut(draft_length))

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Keep nothing: the cache holds masks, and the next round feeds the accepted tokens."""

    def replay_refusal(self, do_sample: bool) -> str | None:
        """Refuse trees under sampling, since their draws are not known."""
        return super().replay_refusal(do_sample and not (self.tree is not None and self.tree.is_chain))

    def replay(
        self, task: DraftTask, texts: Sequence[WrittenText], distributions: Sequence[AtTokens] | None
    ) -> BatchReplay:
        """Replay chains, and at T=0 trees, up to the trained length."""
        drafted, texts = fit_positions(texts, self.positions)
        depth, sampler, v = self._cut(task.draft_length), task.sampler, task.vocab_size
        tree = self.shape(depth)
        if distributions is not None:
            pairs = [
                text_acceptance(self.draft_model, text, sampler, v, p, tree.depth, self.greedy)
                for text, p in zip(drafted, distributions, strict=True)
            ]
            acceptance = pad_tokens([a_NK for a_NK, _ in pairs], texts, 0.0)
            return replay_by_start(texts, acceptance, [overlap_N for _, overlap_N in pairs])
        # Depths below the tree are replayed with width 1, for servers that draft chains.
        widths, is_chain = [*tree.widths, *[1] * (depth - tree.depth)], self.tree is None
        ranked = [text_ranks(self.draft_model, text, sampler, v, widths, is_chain) for text in drafted]
        ranks = [part.up_to(len(text)) for (part, _), text in zip(ranked, texts, strict=True)]
        return replay_by_start_ranks(ranks, tree, [agreement_N for _, agreement_N in ranked])

    def _cut(self, draft_length: int) -> int:
        return draft_length if self.longest is None else min(draft_length, self.longest)

    def draft(self, texts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft all tokens in one forward."""
        lengths = [self._cut(k) for k in draft_lengths]
        depth = max(lengths)
        masks = torch.full((depth - 1,), self._mask, device=texts[0].device)
        logits_BKV = self.feeder.feed_texts(texts, masks)[:, :depth]
        return draft_static_tree(
            self.shape(depth),
            self.samplers,
            texts,
            lengths,
            self.generators,
            self.draws and (self.tree is None or self.task.draw_siblings),
            self.wants_confidence,
            lambda level, tokens: logits_BKV[:, level.depth, None],
        )
