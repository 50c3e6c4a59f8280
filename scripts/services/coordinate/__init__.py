"""`draftsmith coordinate`: one door to several inference servers; rules, load and measured costs say who answers."""
