"""Replay's sums: from a proposer's acceptance on a text to the rounds that would have written it."""
