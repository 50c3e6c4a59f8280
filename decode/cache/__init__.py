"""A model with its key-value cache, and the models whose cache can be rolled back."""

from draftsmith.decode.cache.checks import cached_numbers, check_causal, check_rollback, positions_of
from draftsmith.decode.cache.layers import Places
from draftsmith.decode.cache.model import CachedModel, SavedRow, padded
from draftsmith.decode.cache.rotary import own_positions, rotary_limit, rotate_by_text

__all__ = [
    "CachedModel",
    "Places",
    "SavedRow",
    "cached_numbers",
    "check_causal",
    "check_rollback",
    "own_positions",
    "padded",
    "positions_of",
    "rotary_limit",
    "rotate_by_text",
]
