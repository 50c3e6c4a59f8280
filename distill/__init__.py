"""Distil a draft model from a frozen target."""

from draftsmith.train.losses.chunked import lean_divergence
from draftsmith.train.losses.divergences import divergence

__all__ = ["divergence", "lean_divergence"]
