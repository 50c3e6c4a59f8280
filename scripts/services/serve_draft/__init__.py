"""`draftsmith serve-draft`: a draft model served over HTTP to decoders in other processes."""
