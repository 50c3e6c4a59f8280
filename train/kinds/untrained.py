"""Kinds of drafters that nobody trains: n-grams of the text, and the target's own first layers."""

import hashlib
from typing import TYPE_CHECKING

from draftsmith.decode.errors import InputError
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading, no_argument
from draftsmith.train.kinds.kind import DrafterKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptLookup(DrafterKind):
    """Copies what followed the text's last n-gram; its argument, such as "1-3", are the shortest and longest n."""

    name, title, stored = "prompt_lookup", "n-grams", False
    flags, switch = ("prompt_lookup",), True
    figures = ("prompt_lookup_min", "prompt_lookup_max")
    drafts_less = copies = True

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Read the lengths."""
        from draftsmith.decode import PromptLookupProposer

        least, dash, most = (spec.path or "1-3").partition("-")
        if not (dash and least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
            raise InputError(
                f"drafter: expected {self.name}:MIN-MAX, the shortest and the longest n-gram, found {spec.path}"
            )
        lengths = {"prompt_lookup_min": int(least), "prompt_lookup_max": int(most)}
        return self.drafter(spec, PromptLookupProposer(int(most), int(least)), figures=lengths)


class Suffix(DrafterKind):
    """Copies by frequency; its argument is the shortest match, and perhaps ",FILE" with a store of earlier texts."""

    name, title, stored = "suffix", "suffix matches", False
    figures = ("suffix_match",)
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
            store = SuffixStore.load(path, vocab_size, tokenizer=digest_of(loading.tokenizer))
        proposer = SuffixProposer(int(least), store=store)
        return self.drafter(spec, proposer, figures={"suffix_match": int(least)})


class LookAhead(DrafterKind):
    """Guesses several tokens by Jacobi iterations of the target itself."""

    name, title, stored = "lookahead", "look-ahead", False

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Make one."""
        from draftsmith.decode import LookaheadProposer

        no_argument(spec)
        return self.drafter(spec, LookaheadProposer())


class Unigram(DrafterKind):
    """Guesses without looking at the text: the tokens that are accepted most often."""

    name, title, stored = "unigram", "blind guesses", False

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Make one."""
        from draftsmith.decode import BlindProposer

        no_argument(spec)
        return self.drafter(spec, BlindProposer())


class EarlyExit(DrafterKind):
    """Drafts with the target's first layers; its argument is how many."""

    name, title, stored, grows_trees = "early_exit", "an early exit", False, True
    flags = ("exit_layers",)

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Cut the target off behind its first layers."""
        from draftsmith.decode import DraftModelProposer, early_exit

        depth, layers = loading.target.config.get_text_config().num_hidden_layers, spec.path or ""
        if not layers.isdecimal() or not 1 <= int(layers) <= depth:
            raise InputError(
                f"drafter: expected {self.name}:N with at most the target's {depth} layers, found {layers or 'none'}"
            )
        return self.drafter(spec, DraftModelProposer(early_exit(loading.target, int(layers)), spec.tree))

    def cached_numbers(self, drafter: Drafter) -> int | None:
        """Return None: its layers are the target's, its cache is not."""
        return None


def digest_of(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return what tells a tokenizer's tokens from those of others: a store of texts must be of the target's."""
    return hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
