"""Kinds of drafters without training: copies of the text, look-ahead, blind guesses."""

import hashlib
from typing import TYPE_CHECKING

from draftsmith.decode.errors import InputError
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading, no_argument
from draftsmith.train.kinds.kind import DrafterKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptLookup(DrafterKind):
    """Copies the continuation of the text's last n-gram.

    Its argument, such as "1-3", is the shortest and longest n; "simple-2" is llama.cpp's `ngram-simple` with n = 2.
    """

    name, title, stored = "prompt_lookup", "n-grams", False
    flags, switch = ("prompt_lookup",), True
    drafts_less = copies = True

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Read the lengths."""
        from draftsmith.decode import PromptLookupProposer

        least, dash, most = (spec.path or "1-3").partition("-")
        latest, least = least == "simple", most if least == "simple" else least
        if not (dash and least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
            raise InputError(
                f"drafter: expected {self.name}:MIN-MAX, the shortest and the longest n-gram, or {self.name}:simple-N, "
                f"found {spec.path}"
            )
        lengths = {"prompt_lookup_min": int(least), "prompt_lookup_max": int(most)}
        return self.drafter(spec, PromptLookupProposer(int(most), int(least), latest), figures=lengths)


class Suffix(DrafterKind):
    """Copies by frequency; its argument is the shortest match, and optionally ",FILE" with a store of earlier texts."""

    name, title, stored = "suffix", "suffix matches", False
    drafts_less = copies = True

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Read the match, and the store."""
        from draftsmith.decode import SuffixProposer, SuffixStore

        least, comma, path = (spec.path or "2").partition(",")
        if not least.isdecimal() or int(least) < 1 or (comma and not path):
            raise InputError(
                f"drafter: expected {self.name}:MIN or {self.name}:MIN,FILE, the shortest match in tokens and a store, "
                f"found {spec.path}"
            )
        store = None
        if path:
            vocab_size = loading.target.config.get_text_config().vocab_size
            store = SuffixStore.load(path, vocab_size, tokenizer=vocabulary_digest(loading.tokenizer))
        proposer = SuffixProposer(int(least), store=store)
        return self.drafter(spec, proposer, figures={"suffix_match": int(least)})


class LookAhead(DrafterKind):
    """Guesses several tokens by Jacobi iterations of the target itself."""

    name, title, stored = "lookahead", "look-ahead", False

    def check(self, spec: DrafterSpec, loading: Loading) -> None:
        """Require a target that verifies trees."""
        loading.require_chains(f"drafter: {self.name}")

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Return the drafter, whose window is a tree."""
        from draftsmith.decode import LookaheadProposer

        no_argument(spec)
        return self.drafter(spec, LookaheadProposer())


class Unigram(DrafterKind):
    """Guesses the tokens that are accepted most often, regardless of the text."""

    name, title, stored = "unigram", "blind guesses", False

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Return the drafter."""
        from draftsmith.decode import BlindProposer

        no_argument(spec)
        return self.drafter(spec, BlindProposer())


def vocabulary_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a digest of a tokenizer's vocabulary, which a store of texts must share with the target."""
    return hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
