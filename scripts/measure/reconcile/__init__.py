"""A server beside a report: what every round of a text accepts, what a server must count, and why it does not."""
