"""`draftsmith choose`: find the drafter to train for a target, by training several a little."""
