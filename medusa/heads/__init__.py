"""Medusa and Hydra heads."""
