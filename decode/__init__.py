"""Inference and measurement: the speculative decoder, its proposers and its counts. It needs no Trainer and no data."""

from draftsmith.decode.autoregressive import autoregressive_decode, autoregressive_generate
from draftsmith.decode.counts import Counts
from draftsmith.decode.errors import InputError
from draftsmith.decode.generation import DecodeOutput, Departure
from draftsmith.decode.measurement.replay import Replay, replay_acceptance
from draftsmith.decode.planner import Plan
from draftsmith.decode.proposers.base import Proposal, Proposer
from draftsmith.decode.proposers.draft_model import DraftModelProposer, DynamicTree
from draftsmith.decode.proposers.early_exit import early_exit
from draftsmith.decode.proposers.lookahead import LookaheadProposer
from draftsmith.decode.proposers.prompt_lookup import PromptLookupProposer
from draftsmith.decode.proposers.retokenized import RetokenizedProposer
from draftsmith.decode.proposers.run_ahead import RunAheadProposer
from draftsmith.decode.proposers.unigram import BlindProposer
from draftsmith.decode.rules import Cascade, Exact, Threshold, Typical
from draftsmith.decode.speculative import Round, speculative_decode, speculative_generate
from draftsmith.decode.tree import Tree

__all__ = [
    "BlindProposer",
    "Cascade",
    "Counts",
    "DecodeOutput",
    "Departure",
    "DraftModelProposer",
    "DynamicTree",
    "Exact",
    "InputError",
    "LookaheadProposer",
    "Plan",
    "PromptLookupProposer",
    "Proposal",
    "Proposer",
    "Replay",
    "RetokenizedProposer",
    "Round",
    "RunAheadProposer",
    "Threshold",
    "Tree",
    "Typical",
    "autoregressive_decode",
    "autoregressive_generate",
    "early_exit",
    "replay_acceptance",
    "speculative_decode",
    "speculative_generate",
]
