"""Benchmarks that anyone can run: `python -m draftsmith.scripts.bench.NAME`."""
