"""Servers: exports for them, their counters, what measures and tests them, and a vLLM in another Python."""
