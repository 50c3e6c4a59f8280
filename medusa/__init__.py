"""Medusa heads: trained on a frozen target, or with it, searched for a tree, decoded and exported."""

from draftsmith.medusa.heads import MedusaConfig, MedusaHeads
from draftsmith.medusa.proposer import MedusaProposer

__all__ = ["MedusaConfig", "MedusaHeads", "MedusaProposer"]
