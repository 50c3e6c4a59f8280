"""`draftsmith tune`: lossy rules, speed against departure from the target."""
