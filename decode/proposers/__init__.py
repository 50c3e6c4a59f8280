"""Proposers: drafters of the tokens that the target verifies."""
