"""The texts that a draft service remembers, their caches, and their drafts, copied or the model's.

A text's keys and values are part of a batch (`CachedModel`) while the same texts are drafted for together, round after
round, without copying the cache. When the batch changes, each row is saved, and a new batch starts from the saved rows.
If room is needed, the least recently used text is forgotten. A text with a copied draft is in no batch in that round;
its missing tokens are fed when the model drafts for it again.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache import CachedModel, SavedRow, pad_right, returns_to, rotary_limit
from draftsmith.decode.proposers.copied import CopyProposer, Evidence, Finder
from draftsmith.decode.sampling import argmax
from draftsmith.scripts.services.draft_protocol import DraftRow

AFTER_A_ROUND = 2
"""The most tokens missing from a text's cache after a round: the target's own, and the last drafted one, never fed."""
LEAST_ROOM = 256  # the least capacity, in tokens, of the finders of copies


class Copies:
    """Drafters that copy chains, in drafting order, and the switch that decides from evidence which draft to take.

    `last_length` limits the model's drafts where nothing is copied.
    """

    def __init__(
        self, drafters: Sequence[CopyProposer], switch: Callable[[Evidence], bool], last_length: int | None = None
    ):
        self._drafters, self._switch, self.last_length = drafters, switch, last_length

    def of_text(self, room: int) -> "CopiesOfText":
        """Return a finder of copies in a text of at most `room` tokens."""
        return CopiesOfText([drafter.finder(room) for drafter in self._drafters], self._switch, room)


class CopiesOfText:
    """Finds the copies for one growing text of at most `room` tokens, with a finder for each drafter."""

    def __init__(self, finders: Sequence[Finder], switch: Callable[[Evidence], bool], room: int):
        self.room, self._finders, self._switch = room, finders, switch
        self._tokens = np.empty(room, dtype=np.int64)
        self._length = 0

    def find(self, tokens: Sequence[int], draft_length: int) -> list[int]:
        """Return the first chain that the switch takes, or an empty one; the text has grown since the last call."""
        self._tokens[self._length : len(tokens)] = tokens[self._length :]
        self._length = len(tokens)
        for finder in self._finders:
            copied = finder(self._tokens[: self._length], draft_length)
            if self._switch(copied.evidence):
                return list(copied.tokens)
        return []


@dataclass
class CachedText:
    """One text and its cache."""

    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    """The cached tokens, slot for slot: those of the text, and drafted ones after them."""
    saved: SavedRow = ()  # the cache, while the text is in no batch
    copies: CopiesOfText | None = None  # made at the first search; anew if the text changes other than by growing

    def update(self, start: int, tokens: Sequence[int]) -> None:
        """Set the text to its first `start` tokens and these; drop cached tokens from the first difference on."""
        if self.tokens[start:] != list(tokens[: len(self.tokens) - start]):
            self.copies = None
        agreed = min(start, len(self.slots))
        if agreed == start:
            cached = self.slots[start : start + len(tokens)]
            differs = (i for i, (slot, token) in enumerate(zip(cached, tokens, strict=False)) if slot != token)
            agreed += next(differs, len(cached))
        del self.slots[agreed:]
        self.tokens[start:] = tokens

    @property
    def lacking(self) -> int:
        """The number of tokens to feed before a draft; the last token is always fed."""
        return len(self.tokens) - self.fed

    @property
    def fed(self) -> int:
        """The number of cached tokens that a draft may start from."""
        return min(len(self.slots), len(self.tokens) - 1)


class DraftTexts:
    """A draft model and the texts that it drafts for; used by one thread only.

    Args:
        max_length: the most tokens of a text, including drafted ones; the rotary embedding may lower it.
        cache_tokens: the most cached tokens, at least `max_length`. Each row of the present batch counts as its longest
            text. While a batch changes, there are up to twice as many.
    """

    def __init__(
        self, model: PreTrainedModel, max_length: int, max_draft_length: int, cache_tokens: int,
        copies: Copies | None = None,
    ):  # fmt: skip
        self.copies = copies
        self.model, self.max_draft_length, self.cache_tokens = model, max_draft_length, cache_tokens
        limit = rotary_limit(model)
        self.max_length = max_length if limit is None else min(max_length, limit[1])
        # A padded head may draft ids beyond the tokenizer's, which the target rejects.
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self._known = len(cast(Tensor, model.get_input_embeddings().weight))
        self._texts: OrderedDict[Hashable, CachedText] = OrderedDict()  # least recently used first
        self._batch: list[Hashable] = []
        self._cache: CachedModel | None = None
        self.evictions = 0  # texts that were forgotten to make room
        self.copied = 0  # drafts that were copied

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def cached_tokens(self) -> int:
        """The number of cached tokens, as `cache_tokens` counts them."""
        batch = [len(self._texts[key].slots) for key in self._batch]
        aside = sum(len(text.slots) for key, text in self._texts.items() if key not in self._batch)
        return aside + len(batch) * max(batch, default=0)

    def forget(self, keys: Sequence[Hashable]) -> None:
        """Drop texts; unknown keys are ignored."""
        for key in keys:
            self._texts.pop(key, None)
        if not self._texts.keys() >= set(self._batch):
            self._put_aside()

    def clear(self) -> None:
        """Forget everything, because an error may have left a batch half written."""
        self._texts.clear()
        self._batch, self._cache = [], None

    @torch.inference_mode()
    def draft(self, keys: Sequence[Hashable], rows: Sequence[DraftRow]) -> list[list[int] | None]:
        """Return a draft for each text, copied or greedy; None if the text is not known up to its row's `start`."""
        drafts: list[list[int] | None] = []
        draft_lengths: dict[Hashable, int] = {}
        longest = None if self.copies is None else self.copies.last_length
        for key, row in zip(keys, rows, strict=True):
            text = self._texts.get(key, CachedText())
            if row.start > len(text.tokens):
                drafts.append(None)
                continue
            drafts.append([])
            self._texts[key] = text
            self._texts.move_to_end(key)
            text.update(row.start, row.tokens)
            if (room := min(row.want, self.max_draft_length, self.max_length - len(text.tokens))) > 0:
                if copied := self._copied(text, room):
                    drafts[-1] = copied
                    self.copied += 1
                else:
                    draft_lengths[key] = room if longest is None else min(room, longest)
        draft_lengths = self._make_room(draft_lengths)
        if not draft_lengths:
            return [draft if key in self._texts else None for key, draft in zip(keys, drafts, strict=True)]
        self._gather(list(draft_lengths))
        chains = dict(zip(self._batch, self._chains([draft_lengths[key] for key in self._batch]), strict=True))
        return [chains.get(key, draft) if key in self._texts else None for key, draft in zip(keys, drafts, strict=True)]

    def _copied(self, text: CachedText, length: int) -> list[int]:
        """Return a text's copied draft of at most `length` tokens; empty if the model should draft."""
        if self.copies is None:
            return []
        if text.copies is None or len(text.tokens) > text.copies.room:
            # Twice its tokens, not `max_length`, which would waste memory; doubling makes refills rare.
            text.copies = self.copies.of_text(max(LEAST_ROOM, 2 * len(text.tokens)))
        draft = text.copies.find(text.tokens, length)
        # The target may have tokens that the draft does not; the protocol forbids them in drafts.
        end = next((index for index, token in enumerate(draft) if token >= self.vocab_size), len(draft))
        return draft[:end]

    def _make_room(self, draft_lengths: dict[Hashable, int]) -> dict[Hashable, int]:
        """Forget texts until the rest fits; return the rest of `draft_lengths`."""
        # Texts that were never drafted for count too, or they would never be forgotten.
        sizes = {key: max(len(text.tokens), len(text.slots)) for key, text in self._texts.items()}
        sizes |= {key: len(self._texts[key].tokens) + want for key, want in draft_lengths.items()}
        saved, batch = sum(size for key, size in sizes.items() if key not in draft_lengths), dict(draft_lengths)
        for key in list(self._texts):
            if saved + len(batch) * max((sizes[key] for key in batch), default=0) <= self.cache_tokens:
                break
            if key in batch:
                del batch[key]
            else:
                saved -= sizes[key]
            self.forget([key])
            self.evictions += 1
        return batch

    def _gather(self, keys: Sequence[Hashable]) -> None:
        """Make these texts the batch, with no more missing tokens in a row than one forward feeds."""
        texts = [self._texts[key] for key in keys]
        most = min(AFTER_A_ROUND, *(len(text.tokens) for text in texts))
        # A single text is fed the tokens of its copied drafts in place; in a batch every row would be fed as many.
        at_once = max(most, self.max_draft_length) if len(texts) == 1 else most
        if set(keys) == set(self._batch) and all(text.lacking <= at_once for text in texts) and self._returns():
            return
        self._put_aside()
        for text in texts:
            if not returns_to(text.saved, text.fed):  # a state that far back is not kept
                text.slots, text.saved = [], ()
        if fresh := [text for text in texts if not text.slots and len(text.tokens) > 1]:
            cache = self._new_cache(len(fresh))
            cache.prefill_texts([self._tensor(text.tokens) for text in fresh])
            for row, text in enumerate(fresh):
                text.slots = text.tokens[:-1]
                text.saved = cache.saved(row, len(text.slots))
        for text in texts:
            if text.lacking > most:
                cache = self._new_cache(1)
                cache.restore([text.saved])
                start = len(text.slots)
                cache.feed(self._tensor(text.tokens[start:-1])[None], [start], keep=1)
                text.slots = text.tokens[:-1]
                text.saved = cache.saved(0, len(text.slots))
        self._batch, self._cache = list(keys), self._new_cache(len(keys))
        self._cache.restore([text.saved for text in texts])
        for text in texts:
            text.saved = ()

    def _returns(self) -> bool:
        """Return whether the batch can be fed from each text's last cached token on."""
        assert self._cache is not None
        return all(self._cache.returns_to(row, self._texts[key].fed) for row, key in enumerate(self._batch))

    def _put_aside(self) -> None:
        """Save the rows of the present batch and dissolve it."""
        batch, cache = self._batch, self._cache
        self._batch, self._cache = [], None
        for row, key in enumerate(batch):
            if cache is not None and key in self._texts:
                text = self._texts[key]
                text.saved = cache.saved(row, len(text.slots))

    def _chains(self, draft_lengths: Sequence[int]) -> list[list[int]]:
        """Draft all rows of the batch one token at a time, and cut each draft to its wanted length."""
        assert self._cache is not None
        texts = [self._texts[key] for key in self._batch]
        lengths, lacking = [len(text.tokens) for text in texts], max(text.lacking for text in texts)
        if lacking > 1 and len(texts) > 1 and self._cache.has_states:  # rows cannot be fed again from earlier tokens
            parts = [self._tensor(text.tokens[text.fed : -1]) for text in texts]
            self._cache.feed(pad_right(parts, lacking - 1), [text.fed for text in texts], keep=1)
            lacking = 1
        # All rows are fed equally many tokens; rows that miss fewer are fed some again, which overwrites equal slots.
        fed = torch.stack([self._tensor(text.tokens[-lacking:]) for text in texts])
        logits = self._cache.feed(fed, [length - lacking for length in lengths], keep=1)
        chosen: list[Tensor] = []
        for step in range(max(draft_lengths)):
            if step:
                logits = self._cache.feed(chosen[-1], [length + step - 1 for length in lengths])
            chosen.append(argmax(logits.float()))  # (B, 1)
        drafts = [draft[:want] for draft, want in zip(torch.cat(chosen, 1).tolist(), draft_lengths, strict=True)]
        for text, draft in zip(texts, drafts, strict=True):
            text.slots += [*text.tokens[len(text.slots) :], *draft[:-1]]
        return drafts

    def _new_cache(self, rows: int) -> CachedModel:
        return CachedModel(self.model, rows, self.max_length, self.max_draft_length, rollback=self.max_length)

    def _tensor(self, tokens: Sequence[int]) -> Tensor:
        """Return tokens, (T,), on the model's device; tokens that only the target has are replaced by 0."""
        known = [token if token < self._known else 0 for token in tokens]
        return torch.tensor(known, dtype=torch.long, device=self.model.device)
