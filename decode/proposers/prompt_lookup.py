"""Drafts copied from the text itself: no model, no memory, free wherever the text repeats itself."""

from collections.abc import Iterator, Sequence
from math import inf

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.copied import CopyProposer, Evidence, Finder, Found
from draftsmith.decode.replay.texts import Distributions
from draftsmith.decode.rows import host_tokens
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import Tree


class PromptLookupProposer(CopyProposer):
    """Proposes what followed the text's last n tokens where they stood before, in prompt or output.

    Prompt lookup decoding (Saxena 2023; in transformers `PromptLookupCandidateGenerator`). The longest n-gram that
    occurs earlier wins. Of its occurrences the most recent one with a whole draft behind it is taken, or where none
    has that, the one with the longest continuation. Without a match nothing is drafted. The draft is deterministic.

    Args:
        max_ngram: the longest n-gram to look for, in tokens.
        min_ngram: the shortest one that counts as a match.

    Raises:
        InputError: not 1 ≤ `min_ngram` ≤ `max_ngram`.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1):
        if not 1 <= min_ngram <= max_ngram:
            raise InputError(f"ngram: expected 1 ≤ min_ngram ≤ max_ngram, found {min_ngram} and {max_ngram}")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def finder(self, max_length: int) -> Finder:
        """Return what finds chains behind a text; it keeps nothing."""
        return self._find

    def find(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Found]:
        """Find a chain for each row, possibly an empty one."""
        return [self._find(text, k) for text, k in zip(host_tokens(contexts), draft_lengths, strict=True)]

    def distributions_after(self, target: PreTrainedModel, sampler: Sampler) -> Distributions | None:
        """Return the first drafted token's distribution: one-hot, or all zero where nothing is drafted."""
        vocab_size = target.config.get_text_config().vocab_size

        def distributions(ids_BT: Tensor, wanted_BT: Tensor, columns: int) -> Iterator[Tensor]:
            texts = ids_BT.cpu().numpy()
            for start in range(1, ids_BT.shape[1], columns):
                places = wanted_BT[:, start : start + columns].T.nonzero().tolist()
                q = torch.zeros(len(places), vocab_size, device=ids_BT.device)
                for i, (column, row) in enumerate(places):
                    q[i, texts[row, self._continuation(texts[row, : start + column], 1)[0]]] = 1.0
                yield q

        return distributions

    def _find(self, text: np.ndarray, draft_length: int) -> Found:
        place, match = self._continuation(text, draft_length)
        tokens = text[place]
        return Found(tokens.tolist(), Tree.chain(len(tokens)), Evidence(match, inf if match else 0.0, len(text)))

    def _continuation(self, text: np.ndarray, draft_length: int) -> tuple[slice, int]:
        """Return where in the text (T,) that stands which followed, at most `draft_length` tokens, and behind what n.

        n is 0 without a match.
        """
        length, matched = len(text), 0
        ends = np.arange(1, length)  # where earlier occurrences end, in ascending order
        while matched < self.max_ngram:
            ends_further = ends[ends > matched]
            # An occurrence of the last n + 1 tokens is one of the last n with the right token before it.
            ends_further = ends_further[text[ends_further - matched - 1] == text[length - matched - 1]]
            if not len(ends_further):
                break
            ends, matched = ends_further, matched + 1
        if matched < self.min_ngram:
            return slice(0, 0), 0
        whole = ends[ends + draft_length <= length]
        end = int(whole[-1] if len(whole) else ends[0])
        return slice(end, min(end + draft_length, length)), matched
