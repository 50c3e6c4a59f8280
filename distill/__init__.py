"""Distil a draft model from a frozen target."""

from draftsmith.train.divergences import divergence
from draftsmith.train.lean import lean_divergence

__all__ = ["divergence", "lean_divergence"]
