"""Measuring acceptance, speed and exactness of a drafter against a target."""
