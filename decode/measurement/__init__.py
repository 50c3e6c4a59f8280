"""Measuring acceptance, speed and exactness of a drafter against a target."""

FALSE_ALARM = 1e-4
"""The probability with which a lossless drafter fails one distribution test at most."""
LEAST_TOKENS = 2000
"""The tokens that this test needs: 20 for each of its 10 × 10 bins of pairs."""
