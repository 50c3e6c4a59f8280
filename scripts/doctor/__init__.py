"""`draftsmith doctor`: a check whether a target and drafters fit each other."""
