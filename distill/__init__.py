"""Distil a draft model from a frozen target."""

from draftsmith.distill.divergences import divergence

__all__ = ["divergence"]
