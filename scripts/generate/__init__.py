"""`draftsmith generate`: decode one prompt in a terminal, and show the drafting."""
