"""`draftsmith doctor`: whether a target and a drafter fit each other."""
