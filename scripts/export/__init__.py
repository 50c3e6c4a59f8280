"""`draftsmith export`: drafters in the formats of other projects, and the commands that serve them."""
