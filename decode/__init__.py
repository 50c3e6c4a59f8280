"""Inference and measurement: the speculative decoder, its proposers and its counts. It needs no Trainer and no data."""

from typing import TYPE_CHECKING

from draftsmith.decode.lazy import lazy_exports

if TYPE_CHECKING:
    from draftsmith.decode.autoregressive import autoregressive_decode as autoregressive_decode
    from draftsmith.decode.autoregressive import autoregressive_generate as autoregressive_generate
    from draftsmith.decode.counts import Counts as Counts
    from draftsmith.decode.draft_models.cut_vocabulary import cut_head as cut_head
    from draftsmith.decode.errors import InputError as InputError
    from draftsmith.decode.generation import DecodeOutput as DecodeOutput
    from draftsmith.decode.measurement.replay import Replay as Replay
    from draftsmith.decode.measurement.replay import replay_acceptance as replay_acceptance
    from draftsmith.decode.proposers.base import Proposal as Proposal
    from draftsmith.decode.proposers.base import Proposer as Proposer
    from draftsmith.decode.proposers.draft_model import DraftModelProposer as DraftModelProposer
    from draftsmith.decode.proposers.early_exit import early_exit as early_exit
    from draftsmith.decode.proposers.hybrid import HybridProposer as HybridProposer
    from draftsmith.decode.proposers.hybrid import Switch as Switch
    from draftsmith.decode.proposers.lookahead import LookaheadProposer as LookaheadProposer
    from draftsmith.decode.proposers.prompt_lookup import PromptLookupProposer as PromptLookupProposer
    from draftsmith.decode.proposers.run_ahead import RunAheadProposer as RunAheadProposer
    from draftsmith.decode.proposers.suffix.proposer import SuffixProposer as SuffixProposer
    from draftsmith.decode.proposers.suffix.store import SuffixStore as SuffixStore
    from draftsmith.decode.proposers.unigram import BlindProposer as BlindProposer
    from draftsmith.decode.rows import Departure as Departure
    from draftsmith.decode.rules import Cascade as Cascade
    from draftsmith.decode.rules import Exact as Exact
    from draftsmith.decode.rules import Threshold as Threshold
    from draftsmith.decode.rules import Typical as Typical
    from draftsmith.decode.speculative import Round as Round
    from draftsmith.decode.speculative import speculative_decode as speculative_decode
    from draftsmith.decode.speculative import speculative_generate as speculative_generate
    from draftsmith.decode.tree import Tree as Tree

    ParallelDraftProposer: type[DraftModelProposer]  # the recipe that trains it adds it as an entry point

_EXPORTS = {
    "autoregressive": ("autoregressive_decode", "autoregressive_generate"),
    "counts": ("Counts",),
    "draft_models.cut_vocabulary": ("cut_head",),
    "errors": ("InputError",),
    "generation": ("DecodeOutput",),
    "measurement.replay": ("Replay", "replay_acceptance"),
    "proposers.base": ("Proposal", "Proposer"),
    "proposers.draft_model": ("DraftModelProposer",),
    "proposers.early_exit": ("early_exit",),
    "proposers.hybrid": ("HybridProposer", "Switch"),
    "proposers.lookahead": ("LookaheadProposer",),
    "proposers.prompt_lookup": ("PromptLookupProposer",),
    "proposers.run_ahead": ("RunAheadProposer",),
    "proposers.suffix.proposer": ("SuffixProposer",),
    "proposers.suffix.store": ("SuffixStore",),
    "proposers.unigram": ("BlindProposer",),
    "rows": ("Departure",),
    "rules": ("Cascade", "Exact", "Threshold", "Typical"),
    "speculative": ("Round", "speculative_decode", "speculative_generate"),
    "tree": ("Tree",),
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _EXPORTS.items() for name in names}
__all__ = [*_MODULES, "ParallelDraftProposer"]
if not TYPE_CHECKING:
    __getattr__ = lazy_exports(__name__, _MODULES)
