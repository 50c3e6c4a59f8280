"""The GPU memory of a training run, counted without weights."""
