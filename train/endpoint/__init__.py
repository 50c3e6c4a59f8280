"""Completions by an inference server: requests to it, and what its answers become."""
