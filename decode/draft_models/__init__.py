"""Draft models with a cut vocabulary, and tokens without a logit."""
