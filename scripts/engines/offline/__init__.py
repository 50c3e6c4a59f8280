"""A real vLLM in another Python: offline decoding jobs, and the verification of exports by their answers."""
