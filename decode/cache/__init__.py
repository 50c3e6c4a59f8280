"""A model with its key-value cache, and which models can have one that is rolled back."""

from draftsmith.decode.cache.checks import cached_numbers, check_model, rotary_limit
from draftsmith.decode.cache.layers import Places
from draftsmith.decode.cache.model import CachedModel, SavedRow, padded

__all__ = ["CachedModel", "Places", "SavedRow", "cached_numbers", "check_model", "padded", "rotary_limit"]
