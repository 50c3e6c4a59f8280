"""What the target says of texts: of a model in memory, or from a cache on disk."""
