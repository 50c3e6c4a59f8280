"""`draftsmith tune`: lossy rules, or draft lengths by load."""
