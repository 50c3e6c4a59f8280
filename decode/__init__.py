"""Inference and measurement."""
