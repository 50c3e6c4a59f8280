"""A real vLLM in another Python: jobs that it decodes offline, and what its answers prove of an export."""
