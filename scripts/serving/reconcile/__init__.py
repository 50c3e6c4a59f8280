"""Comparison of a server with a report: rounds of each text, the expected counts, and causes of a difference."""
