"""Replay's sums: what a proposer's acceptance on a text makes of the rounds that would have written it."""
