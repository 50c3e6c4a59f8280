"""Medusa heads in the formats of other tools: written, read back, and described."""
