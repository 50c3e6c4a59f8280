"""`draftsmith serve-draft`: a draft model behind HTTP, for decoders in other processes."""
