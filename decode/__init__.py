"""Inference and measurement: the speculative decoder, its proposers and its counts. It needs no Trainer and no data."""

from draftsmith.decode.autoregressive import autoregressive_decode, autoregressive_generate
from draftsmith.decode.counts import Counts
from draftsmith.decode.errors import InputError
from draftsmith.decode.generation import DecodeOutput
from draftsmith.decode.proposers.draft_model import DraftModelProposer
from draftsmith.decode.proposers.protocol import Proposal, Proposer
from draftsmith.decode.speculative import speculative_decode, speculative_generate

__all__ = [
    "Counts",
    "DecodeOutput",
    "DraftModelProposer",
    "InputError",
    "Proposal",
    "Proposer",
    "autoregressive_decode",
    "autoregressive_generate",
    "speculative_decode",
    "speculative_generate",
]
