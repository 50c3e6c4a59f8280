"""Training code that all kinds of drafters share: data, losses, the teacher, the trainer, memory plans."""
