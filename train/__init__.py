"""The training code that all kinds of drafters share: data, losses, the teacher, the trainer, model loading, memory plans."""
