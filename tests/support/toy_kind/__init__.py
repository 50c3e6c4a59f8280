"""A kind of drafter that repeats what followed a token most often: a trained table of pairs."""
