"""A model with its key-value cache, and the models whose cache can be rolled back."""

from draftsmith.decode.cache.checks import (
    NO_PROGRAMS,
    cached_numbers,
    check_causal,
    check_rollback,
    follows_one_path,
    layers_with_states,
    positions_of,
    runs_in_programs,
    state_bytes,
)
from draftsmith.decode.cache.layers import Slots
from draftsmith.decode.cache.model import CachedModel, SavedRow, pad_right
from draftsmith.decode.cache.rotary import own_positions, rotary_limit, rotate_by_text
from draftsmith.decode.cache.states import returns_to

__all__ = [
    "NO_PROGRAMS",
    "CachedModel",
    "SavedRow",
    "Slots",
    "cached_numbers",
    "check_causal",
    "check_rollback",
    "follows_one_path",
    "layers_with_states",
    "own_positions",
    "pad_right",
    "positions_of",
    "returns_to",
    "rotary_limit",
    "rotate_by_text",
    "runs_in_programs",
    "state_bytes",
]
