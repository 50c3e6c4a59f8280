"""`draftsmith adapt`: train a deployed drafter on its traffic, and replace it if the new one is better."""
