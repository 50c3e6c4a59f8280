"""The costs of rounds, and plans of draft lengths by them."""
