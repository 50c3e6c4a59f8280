"""Servers seen from outside: their counters, what measures and tests them, and a vLLM in another Python."""
