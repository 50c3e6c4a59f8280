"""Medusa heads in the files of other tools: written and proven, read, exported."""
