"""Replay: from a drafter's acceptance on written texts to the expected rounds of decoding them."""
