"""`draftsmith generate`: the decoder, and what it shows while it writes."""
