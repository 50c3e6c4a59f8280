"""`draftsmith choose`: which drafter to train for a target, by training several a little."""
