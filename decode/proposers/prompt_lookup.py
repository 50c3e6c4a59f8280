"""Prompt lookup: drafts copied from earlier in the text, without a model or an index."""

from collections.abc import Iterator
from math import inf

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.copied import CopiedDraft, CopyProposer, Evidence, Finder
from draftsmith.decode.replay.texts import Distributions
from draftsmith.decode.sampling import Sampler


class PromptLookupProposer(CopyProposer):
    """A proposer of the tokens that followed an earlier occurrence of the text's last n tokens, in prompt or output.

    Prompt lookup decoding (Saxena 2023; in transformers `PromptLookupCandidateGenerator`). The longest n-gram with an
    earlier occurrence wins, with 1 ≤ `min_ngram` ≤ n ≤ `max_ngram`. Of its occurrences the most recent one that a whole
    draft follows is taken, or else the one with the longest continuation. Without a match nothing is drafted. The draft
    is deterministic.

    With `latest` the rule is that of llama.cpp's `ngram-simple` (common/ngram-map.cpp) with n = `max_ngram`: the most
    recent occurrence, and what follows it without the text's last token, if that is n tokens or more.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1, latest: bool = False):
        if not 1 <= min_ngram <= max_ngram:
            raise InputError(f"ngram: expected 1 ≤ min_ngram ≤ max_ngram, found {min_ngram} and {max_ngram}")
        self.max_ngram, self.min_ngram, self.latest = max_ngram, min_ngram, latest

    def finder(self, max_length: int) -> Finder:
        """Return a function that drafts chains; it keeps no state."""
        return self._find

    def distributions_after(self, target: PreTrainedModel, sampler: Sampler) -> Distributions | None:
        """Return the first drafted token's distribution: one-hot, or all zero if nothing is drafted."""
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

    def _find(self, text: np.ndarray, draft_length: int) -> CopiedDraft:
        place, match = self._continuation(text, draft_length)
        return CopiedDraft(text[place].tolist(), Evidence(match, inf if match else 0.0, len(text)))

    def _continuation(self, text: np.ndarray, draft_length: int) -> tuple[slice, int]:
        """Return the slice of the text, (T,), that followed the match, and the match's length, 0 without a match."""
        length, matched = len(text), 0
        ends = np.arange(1, length)  # the ends of earlier occurrences, ascending
        while matched < self.max_ngram:
            longer_ends = ends[ends > matched]
            # An occurrence of the last n + 1 tokens is one of the last n with the right token before it.
            longer_ends = longer_ends[text[longer_ends - matched - 1] == text[length - matched - 1]]
            if not len(longer_ends):
                break
            ends, matched = longer_ends, matched + 1
        if self.latest:
            # It does not see an occurrence at the text's start, nor one that the last token alone follows.
            n, ends = self.max_ngram, ends[(ends > matched) & (ends < length - 1)]
            end = int(ends[-1]) if len(ends) and matched == n and length > n + draft_length + 2 else length
            return (slice(end, min(end + draft_length, length - 1)), n) if end + n < length else (slice(0, 0), 0)
        if matched < self.min_ngram:
            return slice(0, 0), 0
        # The latest occurrence before a whole draft, or else the earliest, which the most tokens follow.
        whole = ends[ends + draft_length <= length]
        end = int(whole[-1] if len(whole) else ends[0])
        return slice(end, min(end + draft_length, length)), matched
