"""Parallel drafts: several tokens in one forward (PARD)."""
