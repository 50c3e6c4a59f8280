"""A cached model that is fed with texts, and with the nodes of drafts after them.

Shape suffixes: B rows, K tokens of a block, F nodes fed together, N nodes fed so far, V vocabulary, H hidden.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache import CachedModel, Slots, pad_right
from draftsmith.decode.cache.model import SHORT
from draftsmith.decode.proposers.base import DraftTask, last_tokens
from draftsmith.decode.replay.texts import clamp_tokens
from draftsmith.decode.sampling import align_vocabulary


class ProgramBlock(NamedTuple):
    """The inputs that a program feeds before it drafts: see `ModelDraftForward.forward`."""

    tokens: Tensor  # (B, K) int64
    slots: Slots  # the slot of each row's first token
    kept: Tensor  # the columns whose logits are computed, (L,)
    at: Tensor  # the index of each row's last token among these, (B,)
    ends: Tensor  # the index of each row's last token among its K tokens, (B,)
    further: dict[str, Tensor]  # the model's other inputs, (B, K, …)

    @classmethod
    def ending(cls, tokens: Tensor, slots: Slots) -> "ProgramBlock":
        """Return a block whose rows all end in its last column."""
        rows, k = tokens.shape
        columns, ends = _last_columns(1, k, tokens.device), _last_columns(rows, k, tokens.device)
        return cls(tokens, slots, columns, _last_columns(rows, 1, tokens.device), ends, {})


class Feeder:
    """Keeps the cache of a model fed with the rows' texts: here with their tokens.

    A drafter whose model takes other inputs overrides `feed_texts`, `program_block` and `read`. If `read` returns
    states, nodes of a draft are fed with their parents' as the model's input `states`.

    Args:
        max_length: the greatest number of tokens that a row has in the cache.
        block: the most tokens that are fed at once after the first texts, and the slots that a draft takes.
    """

    def __init__(self, model: PreTrainedModel, task: DraftTask, max_length: int, block: int):
        rows = len(task.generators)
        self.device = model.device  # read once a text: it takes longer than a small kernel
        self.max_length, self.block, self.vocab_size = max_length, block, task.vocab_size
        self.model = CachedModel(model, rows, max_length, block=block, compiled=task.compiled)
        self.cached = [0] * rows  # the number of each row's tokens in the cache
        self.lengths: Slots  # the slot after each row's text
        self.states: Tensor | None = None  # what `read` returned for the texts and the nodes after them, (B, 1 + N, H)

    def set_lengths(self, texts: Sequence[Tensor]) -> None:
        """Take note of the lengths of the texts that are drafted for next."""
        self.lengths = Slots([len(text) for text in texts], self.device)

    def feed_texts(self, texts: Sequence[Tensor], masks: Tensor | None = None) -> Tensor:
        """Feed the uncached tokens of each text, then M masks, (M,), if any; return the last logits, (B, 1 + M, V)."""
        texts, keep = clamp_tokens(self.model.model, texts), 1 if masks is None else 1 + len(masks)
        if len(texts) == 1 and not any(self.cached) and self.model.is_empty:
            output = self.model.prefill(_append_masks(texts[0][None, :], masks), keep)
            self.cached = list(self.lengths.host)
        else:
            block, slots = self._uncached(texts)
            output = self.model.feed(_append_masks(block, masks), slots, keep)
        logits, self.states = self.read(output)
        return logits

    def program_block(self, texts: Sequence[Tensor]) -> ProgramBlock | None:
        """Return what a program has to feed of texts; None if that is too much for one block."""
        texts = clamp_tokens(self.model.model, texts)
        # Short prompts of one length need no prefill of their own: the program feeds them.
        if not any(self.cached) and self.lengths.alike and len(texts) * len(texts[0]) <= SHORT:
            self.cached = list(self.lengths.host)
            return ProgramBlock.ending(torch.stack(list(texts)), Slots([0] * len(texts), texts[0].device))
        return ProgramBlock.ending(*self._uncached(texts))

    def feed_nodes(self, tokens: Tensor, offset: int, visible: Tensor | None, depth: int) -> Tensor:
        """Feed the inner nodes of one depth, (B, F), after `offset` earlier ones; return the logits after them.

        `visible` marks the fed nodes, these included, to which each of them attends, (F, N) or (B, F, N); None in a
        chain.
        """
        starts, count, earlier = self.lengths + offset, tokens.shape[1], self.states
        if visible is None:
            output = self.model.feed(tokens, starts, further=None if earlier is None else {"states": earlier})
            logits, self.states = self.read(output)
            return logits
        visible = visible.to(tokens.device)
        further: dict[str, Tensor] = {}
        if earlier is not None:
            # A node's parent is the last of its ancestors that was fed; 0 is the text's last place.
            order_N = torch.arange(1, offset + 1, device=tokens.device)
            parents_F = (
                (visible[..., :offset] * order_N).amax(-1) if offset else torch.zeros_like(visible[..., 0]).long()
            )
            further["states"] = earlier.take_along_dim(parents_F.expand(len(tokens), count)[..., None], dim=1)
        # A node's position follows from its depth, while slots are numbered through.
        depths = torch.full((count,), depth - 1 - offset, device=tokens.device)
        logits, new = self.read(self.model.feed(tokens, starts, visible=visible, depths=depths, further=further))
        if earlier is not None and new is not None:
            self.states = torch.cat([earlier, new], dim=1)
        return logits

    def read(self, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits of a model's output, (B, F, …), and states for the nodes that follow, if it takes any."""
        return align_vocabulary(output, self.vocab_size), None

    def keep(self, slots: Sequence[Sequence[int]]) -> None:
        """Keep the accepted nodes of each row, given by their slots after the text, as part of the text."""
        paths = [[slot + 1 for slot in row_slots] for row_slots in slots]
        self.cached = [
            min(cached, length) + len(path)
            for cached, length, path in zip(self.cached, self.lengths.host, paths, strict=True)
        ]
        self.model.keep_paths(self.lengths + -1, paths)

    def rewind(self, length: int) -> None:
        """Forget the tokens of each row after the first `length`."""
        self.cached = [min(cached, length) for cached in self.cached]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only some rows."""
        self.model.select(rows)
        self.cached = [self.cached[row] for row in rows]

    def _uncached(self, texts: Sequence[Tensor]) -> tuple[Tensor, Slots]:
        """Return the last tokens of each text, (B, K), and their slots, after feeding the uncached tokens before them.

        All rows get the same K: a row with fewer uncached tokens is fed its last cached ones again, into their slots.
        """
        lengths, shortest = self.lengths.host, min(self.lengths.host)
        lacking = max(length - cached for length, cached in zip(lengths, self.cached, strict=True))
        if not any(self.cached):
            self.model.prefill_texts(texts)
            lacking = 1
        # K is limited by the shortest row, which cannot go back before its beginning, and by the tokens that layers
        # with a window still remember. Rows that lack more are fed the excess first.
        # Layers with states may not remember those tokens, and take the excess of each row from its own end.
        together = shortest if len(texts) == 1 else 1 if self.model.has_states else min(shortest, self.block + 1)
        if lacking > together:
            parts = [text[cached:][: lacking - together] for text, cached in zip(texts, self.cached, strict=True)]
            self.model.feed(pad_right(parts, lacking - together), self.cached, keep=1)
            lacking = together
        self.cached = list(lengths)
        return last_tokens(texts, lacking), self.lengths + -lacking


def _append_masks(tokens_BT: Tensor, masks: Tensor | None) -> Tensor:
    return tokens_BT if masks is None else torch.cat([tokens_BT, masks.expand(len(tokens_BT), -1)], 1)


@lru_cache(maxsize=256)
def _last_columns(rows: int, k: int, device: torch.device) -> Tensor:
    """Return k − 1 for each row, (B,) int64; cached, since creating a tensor costs as much as a small kernel."""
    return torch.full((rows,), k - 1, device=device)
