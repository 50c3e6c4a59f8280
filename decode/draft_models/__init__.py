"""What a draft model is beyond an ordinary one: one that drafts several tokens at once, one with a cut vocabulary."""
