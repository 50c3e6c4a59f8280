"""`draftsmith plan`: whether a training run fits its GPUs."""
