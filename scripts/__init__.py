"""Entry points: the draftsmith command, prepare, measure, report, quickstart."""
