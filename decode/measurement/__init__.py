"""Measuring acceptance, speed and exactness of a drafter against a target."""

FALSE_ALARM = 1e-4
"""A lossless drafter fails one test of the sampled tokens' distribution with at most this probability."""
LEAST_TOKENS = 2000
"""What that test needs: 20 for each of its 10 × 10 bins of pairs."""
