"""`draftsmith tune`: lossy rules, a hybrid's switch, or draft lengths by load."""
