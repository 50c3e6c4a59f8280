"""Other people's servers: exports for them, their counters, what tests them, and a vLLM in another Python."""
