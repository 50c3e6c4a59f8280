"""What a training run holds in GPU memory, counted without weights."""
