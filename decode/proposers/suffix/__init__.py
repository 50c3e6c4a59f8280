"""Drafts copied from indexed texts, by frequency."""
