"""The costs of rounds, and speed-ups by them."""
