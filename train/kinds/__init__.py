"""Kinds of drafters: their base class, and what they share when they are loaded, checked and exported."""
