"""The report of a measurement, as a table, a page and a summary."""
