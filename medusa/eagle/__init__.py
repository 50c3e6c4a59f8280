"""EAGLE-3 heads: a decoder layer on the target's features, that drafts a token at a time (Li et al. 2025)."""
