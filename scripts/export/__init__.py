"""`draftsmith export`: heads in the formats of others, and the lines that launch them or a draft model."""
