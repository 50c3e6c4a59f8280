"""Caches of the target's distributions and features, on disk and in memory."""
