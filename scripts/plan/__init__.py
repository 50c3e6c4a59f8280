"""`draftsmith plan`: a check whether a run fits its GPUs."""
