"""The target's distributions: of a model in memory, or from a cache on disk."""
