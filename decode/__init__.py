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
    from draftsmith.decode.planner import Plan as Plan
    from draftsmith.decode.proposers.base import Proposal as Proposal
    from draftsmith.decode.proposers.base import Proposer as Proposer
    from draftsmith.decode.proposers.draft_model import DraftModelProposer as DraftModelProposer
    from draftsmith.decode.proposers.draft_tree import DynamicTree as DynamicTree
    from draftsmith.decode.proposers.early_exit import early_exit as early_exit
    from draftsmith.decode.proposers.hybrid import HybridProposer as HybridProposer
    from draftsmith.decode.proposers.hybrid import Switch as Switch
    from draftsmith.decode.proposers.lookahead import LookaheadProposer as LookaheadProposer
    from draftsmith.decode.proposers.prompt_lookup import PromptLookupProposer as PromptLookupProposer
    from draftsmith.decode.proposers.retokenized import RetokenizedProposer as RetokenizedProposer
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

    ParallelDraftProposer: type[DraftModelProposer]  # an entry point of the recipe that it belongs to

_MODULES = {
    "autoregressive_decode": "draftsmith.decode.autoregressive",
    "autoregressive_generate": "draftsmith.decode.autoregressive",
    "Counts": "draftsmith.decode.counts",
    "InputError": "draftsmith.decode.errors",
    "DecodeOutput": "draftsmith.decode.generation",
    "Departure": "draftsmith.decode.rows",
    "Replay": "draftsmith.decode.measurement.replay",
    "replay_acceptance": "draftsmith.decode.measurement.replay",
    "Plan": "draftsmith.decode.planner",
    "Proposal": "draftsmith.decode.proposers.base",
    "Proposer": "draftsmith.decode.proposers.base",
    "cut_head": "draftsmith.decode.draft_models.cut_vocabulary",
    "DraftModelProposer": "draftsmith.decode.proposers.draft_model",
    "DynamicTree": "draftsmith.decode.proposers.draft_tree",
    "early_exit": "draftsmith.decode.proposers.early_exit",
    "HybridProposer": "draftsmith.decode.proposers.hybrid",
    "Switch": "draftsmith.decode.proposers.hybrid",
    "LookaheadProposer": "draftsmith.decode.proposers.lookahead",
    "PromptLookupProposer": "draftsmith.decode.proposers.prompt_lookup",
    "RetokenizedProposer": "draftsmith.decode.proposers.retokenized",
    "RunAheadProposer": "draftsmith.decode.proposers.run_ahead",
    "SuffixProposer": "draftsmith.decode.proposers.suffix.proposer",
    "SuffixStore": "draftsmith.decode.proposers.suffix.store",
    "BlindProposer": "draftsmith.decode.proposers.unigram",
    "Cascade": "draftsmith.decode.rules",
    "Exact": "draftsmith.decode.rules",
    "Threshold": "draftsmith.decode.rules",
    "Typical": "draftsmith.decode.rules",
    "Round": "draftsmith.decode.speculative",
    "speculative_decode": "draftsmith.decode.speculative",
    "speculative_generate": "draftsmith.decode.speculative",
    "Tree": "draftsmith.decode.tree",
}
__all__ = [*_MODULES, "ParallelDraftProposer"]
if not TYPE_CHECKING:
    __getattr__ = lazy_exports(__name__, _MODULES)
