"""Shared by commands that talk to an inference server: a client, and the server's counters."""
